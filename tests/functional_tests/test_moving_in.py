# SPDX-License-Identifier: Apache-2.0
"""Moving in: a folder of transformers trained under torchrun, and a script's flags as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.inference.generate import main as generate
from megatron.training import pretrain_gpt
from megatron.training.preprocess_data import _main as preprocess
from tests.functional_tests.small_run import flags, losses, run_here, write_tokens
from tests.functional_tests.torchrun_job import torchrun
from tests.support.hf_converter import checkpoint_model, convert, tensors
from tests.support.hf_folders import VOCABULARY, load_folder, make_model, save_folder
from tests.support.inputs import generator, one_thread
from tests.support.tiktoken_files import TEXTS, TOKENS, write_vocabulary
from tests.unit_tests.training.test_megatron_flags import TWELVE
from tests.unit_tests.training.test_upstream_scripts import REFUSED, THEN, flags_of

#: As Qwen2.5-0.5B is shaped: 14 heads and 2 groups there, tied embeddings, a window that is off.
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
    saved, data = tmp_path / "saved", write_tokens(tmp_path / "data")
    start, like = f"--load-hf {source}", ()
    if way == "import":
        convert("import", "--hf", source, "--save", tmp_path / "imported", "--verify")
        start = f"--load {tmp_path / 'imported'} --use-checkpoint-args"
        like = ("--like", source)  # without a tokenizer nothing leads back to the folder
    words = f"{start} {TRAINING} {TWELVE} --data-path {data} --save {saved}"
    job = torchrun(words.split(), "--standalone", processes=4)
    said, _ = job.communicate(timeout=200)
    assert job.returncode == 0, said
    found = losses(saved / "metrics.jsonl")
    assert sorted(found) == list(range(1, 21))
    assert found[20] < 0.7 * found[1], found
    # Twelve flags without effect: one line, of one rank, names them.
    (line,) = (line for line in said.splitlines() if "no effect here: " in line)
    flags = [word for word in TWELVE.split() if word.startswith("--")]
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
        got = checkpoint_model(latest_checkpoint(saved)).full_logits(tokens).transpose(0, 1)
    assert expected.std() > 1  # else an absolute bound would say little
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
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
def test_a_script_prints_its_configuration(
    script: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world, found = flags_of(script)
    gone = {*REFUSED[script], *THEN.get(script, {})}
    words = [word for flag in found if flag[0] not in gone for word in flag]
    launch = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert pretrain_gpt.main([*words, "--print-config"], launch) == 0
    printed = capsys.readouterr().out.replace('"', "").splitlines()
    assert set(expected.split("|")) <= set(printed)


def test_a_tiktoken_vocabulary_goes_from_text_to_continuations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary, data = write_vocabulary(tmp_path / "vocab.json"), tmp_path / "data"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": " ".join(TEXTS * 9)}) + "\n")
    kind = (
        f"--tokenizer-type TikTokenizer --tokenizer-model {vocabulary} --tiktoken-pattern v1 "
        "--tiktoken-num-special-tokens 12"
    )
    preprocess(f"--input {tmp_path}/a.jsonl --output-prefix {data} --append-eod {kind}".split())
    saved = f"{tmp_path}/saved"
    words = "--lr-warmup-iters 0 --eval-interval 0 --split 100"
    first = f"{words} {kind} --train-iters 2 --save {saved}"
    assert run_here(flags(data, first, without=("--vocab-size",))) == 0
    # A checkpoint says how to make the tokenizer again, for a run that gives none too.
    more = f"{words} --load {saved} --use-checkpoint-args --train-iters 3 --save {tmp_path}/more"
    assert run_here(flags(data, more, without=("--vocab-size",))) == 0
    capsys.readouterr()
    wanted = f"{tmp_path}/out.json"
    words = "--prompt the --max-new-tokens 3 --temperature 0 --output-json"
    assert generate([*f"--load {saved} {words}".split(), wanted], {}) == 0
    (found,) = json.loads(Path(wanted).read_text())
    assert found["prompt_ids"] == [12 + TOKENS.index(b"the")]
    vocabulary.write_text("[]")
    assert generate([*f"--load {saved} {words}".split(), wanted], {}) == 2
    assert "vocab.json is not a tiktoken vocabulary" in capsys.readouterr().err
