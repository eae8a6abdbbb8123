# SPDX-License-Identifier: Apache-2.0
"""Training and generation directly from a Hugging Face folder, without conversion."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron.cli.tokenizers import train_bpe
from megatron.hf.convert import main as convert
from megatron.inference.generate import main as generate
from megatron.training import pretrain_gpt
from megatron.training.checkpointing.hf_import import folder_defaults
from tests.functional_tests.small_run import losses, run_on
from tests.support.hf_folders import VOCABULARY, change_json, make_model, save_folder
from tests.support.quantized_folders import fp8_folders, mxfp4_folders
from tests.support.ranks import start_ranks

RUN = (
    "--mock-data --seq-length 24 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 "
    "--eval-interval 0 --log-interval 1 --progress plain "
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with several files whose tokenizer has a word for every second id."""
    path = tmp_path_factory.mktemp("hf") / "model"
    save_folder(make_model("qwen3-8to1"), path, max_shard_size="40KB")
    vocabulary = {f"w{i}": i for i in range(0, VOCABULARY, 2)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def run(main: Any, words: str, *, code: int = 0) -> str:
    """Run an entry point; return its stdout, or its stderr if it must fail."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(words.split(), {}) == code, err.getvalue()
    return err.getvalue() if code else out.getvalue()


def test_same_command_resumes_and_import_trains_the_same(folder: Path, tmp_path: Path) -> None:
    saved, imported = tmp_path / "saved", tmp_path / "imported"
    line = f"{RUN} --lr 1e-2 --load-hf {folder} --save {saved} --load {saved}"
    output = run(pretrain_gpt.main, f"{line} --exit-interval 2")
    assert f"read the weights of {folder}; starting at iteration 0" in output
    assert "iter_0000002; resuming at iteration 2" in run(pretrain_gpt.main, line)
    run(convert, f"import --hf {folder} --save {imported}")
    from_import = f"{RUN} --lr 1e-2 --load {imported} --use-checkpoint-args --save {tmp_path / 'b'}"
    assert "loaded the weights of" in run(pretrain_gpt.main, from_import)
    loss_by_step = losses(saved / "metrics.jsonl")
    assert len(loss_by_step) == 3
    assert loss_by_step == losses(tmp_path / "b" / "metrics.jsonl")


def test_flags_that_change_the_model_are_refused(folder: Path) -> None:
    free = "--attention-dropout 0.1 --max-position-embeddings 64"
    same = "--hidden-size 48 --num-layers 2 --qk-layernorm --rotary-base 10000"
    line = f"{RUN} --lr 1e-2 --load-hf {folder}"
    printed = run(pretrain_gpt.main, f"{line} {free} {same} --print-config")
    assert "hidden-size: 48" in printed
    wrong = "--hidden-size 64 --no-swiglu --vocab-size 300"
    text = run(pretrain_gpt.main, f"{line} {wrong}", code=2)
    assert text.count("\n") == 1
    for flag in ("--hidden-size is 64, there 48", "--swiglu is False", "--vocab-size is 300"):
        assert flag in text
    assert "--num-layers" not in text
    err = run(pretrain_gpt.main, f"{line} --pretrained-checkpoint x", code=2)
    assert "mutually exclusive" in err
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 64"
    text = run(pretrain_gpt.main, f"{RUN} --lr 1e-2 {shape} --load {folder}", code=2)
    assert "is a Hugging Face folder: give it to --load-hf" in text


def test_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    folder = save_folder(make_model("llama-tied-llama3"), tmp_path / "model")
    train_bpe(["low lower lowest"] * 3, 262, folder / "tokenizer.json")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    commands = [
        (convert, f"import --hf {folder} --save {tmp_path}/{{}}"),
        (pretrain_gpt.main, f"{RUN} --lr 1e-2 --load-hf {folder} --save {tmp_path}/{{}}"),
        (generate, f"--load {folder} --prompt low --max-new-tokens 2"),
    ]
    for number, (main, words) in enumerate(commands):
        run(main, words.format(number))
    weights["lm_head.weight"][VOCABULARY - 1, 5] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for number, (main, words) in enumerate(commands, len(commands)):
        text = run(main, words.format(number), code=2)
        assert text.count("\n") == 1
        assert "lm_head.weight differs" in text
        assert "tie_word_embeddings" in text


def test_printed_options_can_be_loaded_as_config(folder: Path, tmp_path: Path) -> None:
    line = f"{RUN} --lr 1e-2 --load-hf {folder} --print-config"
    printed = run(pretrain_gpt.main, line)
    (tmp_path / "run.yaml").write_text(printed)
    assert run(pretrain_gpt.main, f"--config {tmp_path / 'run.yaml'} --print-config") == printed


@pytest.mark.covers("Hugging Face")
def test_exported_model_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = train_bpe(["low lower lowest"] * 3, 262, tmp_path / "tokenizer.json")
    shape = "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --kv-channels 10 --swiglu "
    shape += "--normalization RMSNorm --qk-layernorm --disable-bias-linear --use-rope-scaling "
    shape += "--position-embedding-type rope "
    shape += f"--tokenizer-model {tmp_path / 'tokenizer.json'}"
    saved, out = tmp_path / "saved", tmp_path / "out"
    run(pretrain_gpt.main, f"{RUN} --lr 1e-2 {shape} --save {saved}")
    assert "verified" in run(convert, f"export --load {saved} --save {out} --verify")
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(str(out))
    assert hf_tokenizer("lower low").input_ids == tokenizer.tokenize("lower low")
    assert hf_tokenizer.eos_token_id == tokenizer.eod
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eod
    run(pretrain_gpt.main, f"{RUN} --lr 1e-2 --load-hf {out} --save {tmp_path / 'b'}")
    text = run(convert, f"export --load {saved} --save {out}", code=2)
    assert "exists: name another" in text
    plain = shape.replace("--swiglu ", "")
    run(pretrain_gpt.main, f"{RUN} --lr 1e-2 {plain} --save {tmp_path / 'plain'}")
    text = run(convert, f"export --load {tmp_path / 'plain'} --save {tmp_path / 'no'}", code=2)
    assert "attention.qk_norm is True, there False: train it with" in text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("no")]


def test_sentencepiece_tokenizer_is_loaded(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = save_folder(make_model("llama-3to1"), tmp_path / "model")
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the theory of the thing"] * 20),
            model_writer=file,
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    (expected,) = generate_json(folder, tmp_path / "one.json")
    run(convert, f"import --hf {folder} --save {tmp_path / 'imported'}")
    assert generate_json(tmp_path / "imported", tmp_path / "again.json") == [expected]
    printed = run(pretrain_gpt.main, f"{RUN} --lr 1e-2 --load-hf {folder} --print-config")
    assert 'tokenizer-type: "sentencepiece"' in printed
    assert str(folder / "tokenizer.model") in printed


def test_tokenizer_of_vocab_and_merges_files_is_loaded(tmp_path: Path) -> None:
    folder = save_folder(make_model("qwen2-window"), tmp_path / "model")
    train_bpe(["low lower lowest w2"] * 3, 262, tmp_path / "tokenizer.json")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (expected,) = generate_json(folder, tmp_path / "one.json")
    run(convert, f"import --hf {folder} --save {tmp_path / 'imported'}")
    assert generate_json(tmp_path / "imported", tmp_path / "again.json") == [expected]
    printed = run(pretrain_gpt.main, f"{RUN} --lr 1e-2 --load-hf {folder} --print-config")
    assert str(folder / "vocab.json") in printed
    saved, out = tmp_path / "saved", tmp_path / "out"
    run(pretrain_gpt.main, f"{RUN} --lr 1e-2 --load-hf {folder} --save {saved}")
    run(convert, f"export --load {saved} --save {out} --verify")
    for name in ("vocab.json", "merges.txt"):
        assert (folder / name).read_bytes() == (out / name).read_bytes()
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, out)]
    assert configs[0] == configs[1]


def generate_json(folder: Path, path: Path, options: str = "") -> list[dict[str, Any]]:
    """Generate from a folder or a checkpoint and return the JSON output."""
    words = f"--load {folder} --temperature 0 --max-new-tokens 8 --device cpu --prompt w2 {options}"
    run(generate, f"{words} --output-json {path}")
    return json.loads(path.read_text())


def generate_on_a_rank(rank: int, world: int, words: list[str], launcher: dict[str, str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return generate(words, {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})


@pytest.mark.covers("generation")
def test_generation_from_folder_checkpoint_and_two_ranks(folder: Path, tmp_path: Path) -> None:
    (single,) = generate_json(folder, tmp_path / "one.json")
    assert len(single["ids"]) == 8
    run(convert, f"import --hf {folder} --save {tmp_path / 'imported'}")
    assert generate_json(tmp_path / "imported", tmp_path / "again.json") == [single]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    words = f"--load {folder} --temperature 0 --max-new-tokens 8 --device cpu --prompt w2 "
    words += f"--tensor-model-parallel-size 2 --output-json {tmp_path / 'two.json'}"
    with start_ranks(generate_on_a_rank, 2, words.split(), launcher, init=False) as ranks:
        assert ranks.values(timeout=60.0) == [0, 0]
    (parallel,) = json.loads((tmp_path / "two.json").read_text())
    assert parallel["ids"] == single["ids"]
    # Each of several end tokens stops generation, from the folder and from its import.
    change_json(folder / "generation_config.json", eos_token_id=[single["ids"][3], 1])
    stop_length = single["ids"].index(single["ids"][3]) + 1
    for source in (folder, tmp_path / "stopping"):
        if source != folder:
            run(convert, f"import --hf {folder} --save {source}")
        (stopped,) = generate_json(source, tmp_path / "stopped.json")
        assert (stopped["ids"], stopped["finish_reason"]) == (single["ids"][:stop_length], "stop")


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (fp8_folders, "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"),
        (mxfp4_folders, "--bf16"),
    ],
    ids=["fp8", "mxfp4"],
)
def test_quantized_folder_trains_like_dequantized_values(
    make: Any, layout: str, tmp_path: Path
) -> None:
    ends = []
    for folder in make(tmp_path):
        train_bpe(["low lower lowest"] * 3, 262, folder / "tokenizer.json")
        save = tmp_path / f"{folder.name}-run"
        words = f"{RUN} --lr 1e-2 --expert-model-parallel-size 2 {layout}"
        run_on(2, f"{words} --load-hf {folder} --save {save}".split())
        ends.append(
            (losses(save / "metrics.jsonl"), generate_json(folder, tmp_path / "texts.json"))
        )
    assert len(ends[0][0]) == 3
    assert ends[0] == ends[1]


@pytest.mark.slow(seconds=8)
def test_unsupported_group_score_is_refused_with_option_names(tmp_path: Path) -> None:
    """Training ranks groups by topk / group-topk scores, transformers always by 2."""
    folder = save_folder(make_model("deepseek"), tmp_path / "model")
    assert folder_defaults({"load-hf": str(folder)})["moe-router-group-topk"] == 2
    change_json(folder / "config.json", num_experts_per_tok=6)
    run(convert, f"import --hf {folder} --save {tmp_path / 'imported'}")
    for source in (
        f"--load-hf {folder}",
        f"--use-checkpoint-args --pretrained-checkpoint {tmp_path / 'imported'}",
    ):
        words = f"{RUN} --lr 1e-3 {source} --save {tmp_path / 'saved'}"
        err = run(pretrain_gpt.main, words, code=2)
        for name in (
            "num_experts_per_tok 6 / topk_group 2",
            "--moe-router-topk",
            "--moe-router-group-topk",
        ):
            assert name in err, err
        assert "group_candidates" not in err
        assert not (tmp_path / "saved").exists()
