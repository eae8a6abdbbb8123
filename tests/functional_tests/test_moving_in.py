# SPDX-License-Identifier: Apache-2.0
"""Migration: an HF folder trained under torchrun, and upstream scripts with unchanged flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.inference.generate import main as generate
from megatron.training import pretrain_gpt
from megatron.training.preprocess_data import _main as preprocess
from tests.functional_tests.small_run import flags, losses, run_in_process, write_tokens
from tests.functional_tests.torchrun_job import torchrun
from tests.support.hf_converter import checkpoint_model, convert, tensors
from tests.support.hf_folders import VOCABULARY, load_folder, make_model, save_folder
from tests.support.inputs import generator, one_thread
from tests.support.tiktoken_files import TEXTS, TOKENS, write_vocabulary
from tests.unit_tests.training.test_megatron_flags import NO_EFFECT_FLAGS
from tests.unit_tests.training.test_upstream_scripts import REFUSED, SECOND_FIXES, read_script

#: The shape of Qwen2.5-0.5B in small: grouped queries, tied embeddings, a disabled window.
QWEN25 = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 64,
    "max_window_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 128,
}
TRAINING = (
    "--split 100 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 20 "
    "--lr 5e-3 --lr-decay-style cosine --eval-interval 0 --log-interval 1 --progress plain "
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
)


@pytest.mark.slow(seconds=15)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["import", "load-hf"])
def test_qwen25_trains_on_4_ranks_and_is_equal_in_transformers(way: str, tmp_path: Path) -> None:
    source = save_folder(make_model("qwen2-window", **QWEN25), tmp_path / "source")
    saved, prefix = tmp_path / "saved", write_tokens(tmp_path / "data")
    start, like = f"--load-hf {source}", ()
    if way == "import":
        convert("import", "--hf", source, "--save", tmp_path / "imported", "--verify")
        start = f"--load {tmp_path / 'imported'} --use-checkpoint-args"
        like = ("--like", source)  # a checkpoint without tokenizer does not name the folder
    words = f"{start} {TRAINING} {NO_EFFECT_FLAGS} --data-path {prefix} --save {saved}"
    job = torchrun(words.split(), "--standalone", processes=4)
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    loss_by_step = losses(saved / "metrics.jsonl")
    assert sorted(loss_by_step) == list(range(1, 21))
    assert loss_by_step[20] < 0.7 * loss_by_step[1], loss_by_step
    # One line of one rank names the twelve flags without effect.
    (line,) = (line for line in output.splitlines() if "no effect here: " in line)
    flags = [word for word in NO_EFFECT_FLAGS.split() if word.startswith("--")]
    assert len(flags) == 12
    assert all(flag in line for flag in flags)

    convert("export", "--load", saved, "--save", tmp_path / "tuned", "--verify", *like)
    before, after = tensors(source), tensors(tmp_path / "tuned")
    assert before.keys() == after.keys()
    assert not any(torch.equal(tensor, after[name]) for name, tensor in before.items())
    tokens = torch.randint(VOCABULARY, (2, 50), generator=generator(4))
    with one_thread(), torch.no_grad():
        loaded = load_folder(tmp_path / "tuned")
        assert type(loaded).__name__ == "Qwen2ForCausalLM"
        expected = loaded(tokens, use_cache=False).logits
        actual = checkpoint_model(latest_checkpoint(saved)).full_logits(tokens).transpose(0, 1)
    assert expected.std() > 1  # otherwise an absolute bound would be too weak
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    configs = [json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "tuned")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "train_gpt3_175b_distributed",
            "num-layers: 96|hidden-size: 12288|position-embedding-type: learned_absolute|"
            "fp16: true|pipeline-model-parallel-size: 16|lr-decay-iters: 430000",
        ),
        (
            "train_llama3_8b_h100_fp8",
            "num-layers: 32|num-query-groups: 8|rotary-base: 1000000.0|bf16: true|"
            "apply-layernorm-1p: true|context-parallel-size: 2|train-samples: 1953125000",
        ),
    ],
)
def test_upstream_script_prints_its_configuration(
    script: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world, script_flags = read_script(script)
    removed = {*REFUSED[script], *SECOND_FIXES.get(script, {})}
    words = [word for flag in script_flags if flag[0] not in removed for word in flag]
    launch = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert pretrain_gpt.main([*words, "--print-config"], launch) == 0
    printed = capsys.readouterr().out.replace('"', "").splitlines()
    assert set(expected.split("|")) <= set(printed)


def test_tiktoken_vocabulary_works_from_text_to_generation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary, prefix = write_vocabulary(tmp_path / "vocab.json"), tmp_path / "data"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": " ".join(TEXTS * 9)}) + "\n")
    kind = (
        f"--tokenizer-type TikTokenizer --tokenizer-model {vocabulary} --tiktoken-pattern v1 "
        "--tiktoken-num-special-tokens 12"
    )
    preprocess(f"--input {tmp_path}/a.jsonl --output-prefix {prefix} --append-eod {kind}".split())
    saved = f"{tmp_path}/saved"
    words = "--lr-warmup-iters 0 --eval-interval 0 --split 100"
    start_flags = f"{words} {kind} --train-iters 2 --save {saved}"
    assert run_in_process(flags(prefix, start_flags, without=("--vocab-size",))) == 0
    # A checkpoint describes its tokenizer for a run that gives no tokenizer.
    resume_flags = (
        f"{words} --load {saved} --use-checkpoint-args --train-iters 3 --save {tmp_path}/more"
    )
    assert run_in_process(flags(prefix, resume_flags, without=("--vocab-size",))) == 0
    capsys.readouterr()
    output_path = f"{tmp_path}/out.json"
    words = "--prompt the --max-new-tokens 3 --temperature 0 --output-json"
    assert generate([*f"--load {saved} {words}".split(), output_path], {}) == 0
    (generated,) = json.loads(Path(output_path).read_text())
    assert generated["prompt_ids"] == [12 + TOKENS.index(b"the")]
    vocabulary.write_text("[]")
    assert generate([*f"--load {saved} {words}".split(), output_path], {}) == 2
    assert "vocab.json is not a tiktoken vocabulary" in capsys.readouterr().err
