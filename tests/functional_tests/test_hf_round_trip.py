# SPDX-License-Identifier: Apache-2.0
"""A model of transformers is fine-tuned on chats, exported, and generates the same text."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.tokenizers import END_OF_DOCUMENT, train_bpe
from megatron.hf.convert import main as convert
from megatron.inference.generate import main as generate
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from megatron.training.preprocess_data import _main as preprocess_main
from megatron.training.pretrain_gpt import main as pretrain
from tests.functional_tests.small_run import losses, run_on
from tests.support.hf_folders import load_folder, make_model, save_folder
from tests.support.inputs import one_thread
from tests.support.llama_tokenizer import BOS, EOS, write_llama_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
WORDS = [
    "red", "blue", "green", "one", "two", "three", "up", "down", "left", "right", "north", "south",
]  # fmt: skip
LEAVE_OUT = "tokenizer-hf-no-include-special-tokens"
PROMPTS = ["user: red blue\nassistant: ", "user: one\nassistant: ", "left"]


def write_chats(path: Path) -> None:
    """Write conversations in which the assistant reverses the words of the user."""
    choose = random.Random(5)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(200):
            words = choose.sample(WORDS, choose.randint(1, 4))
            messages = [
                {"role": "user", "content": " ".join(words)},
                {"role": "assistant", "content": " ".join(reversed(words))},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_model(folder: Path) -> Path:
    """Write a Qwen3-shaped random model with a tokenizer and a chat template."""
    folder.mkdir()
    text = f"user: {' '.join(WORDS)}\nassistant: {' '.join(WORDS)}"
    tokenizer = train_bpe([text] * 3, 300, folder / "tokenizer.json")
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    model = make_model(
        "qwen3-8to1", vocab_size=tokenizer.vocab_size + 5, eos_token_id=tokenizer.eod
    )
    for name, weight in model.named_parameters():  # as small as initial weights
        if "norm" not in name:
            weight.data.mul_(0.3)
    model.generation_config.eos_token_id = [tokenizer.eod, 3]
    return save_folder(model, folder)


def run(main: Any, *words: object) -> str:
    """Run an entry point that must succeed and return its stdout."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words], {})
    assert code == 0, err.getvalue()
    return out.getvalue()


def megatron_tokens(folder: Path, path: Path, *options: str) -> list[list[int]]:
    """Return the token ids that `megatron.inference.generate` generates for the prompts."""
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    words = ["--temperature", "0", "--max-new-tokens", "12", "--output-json", path]
    run(generate, "--load", folder, *prompts, *words, *options)
    return [response["ids"] for response in json.loads(path.read_text(encoding="utf-8"))]


def hf_tokens(folder: Path, **options: bool) -> list[list[int]]:
    """Return the token ids that `transformers` generates for the prompts."""
    transformers = pytest.importorskip("transformers")
    model = load_folder(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    token_ids = []
    with one_thread(), torch.no_grad():
        for text in PROMPTS:
            ids = tokenizer(text, return_tensors="pt", **options).input_ids
            generated = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                pad_token_id=0,
            )
            token_ids.append(generated[0, ids.shape[1] :].tolist())
    return token_ids


@pytest.mark.covers("Hugging Face")
def test_model_round_trips_through_fine_tuning(tmp_path: Path) -> None:
    model, prefix, saved = write_model(tmp_path / "model"), tmp_path / "talks", tmp_path / "saved"
    write_chats(tmp_path / "chats.jsonl")
    preprocess(
        PreprocessConfig(
            input=(str(tmp_path / "chats.jsonl"),),
            output_prefix=str(prefix),
            tokenizer_type="hf",
            tokenizer_model=str(model / "tokenizer.json"),
            chat=True,
            workers=1,
        )
    )
    training = (
        f"--load-hf {model} --sft --data-path {prefix} --split 100 --seq-length 64 "
        "--micro-batch-size 4 --global-batch-size 8 --train-iters 50 --lr 2e-2 --eval-interval 0 "
        "--log-interval 5 --lr-decay-style cosine --lr-warmup-iters 5 "
        "--tensor-model-parallel-size 2 "
        f"--sequence-parallel --use-distributed-optimizer --save {saved} --progress plain"
    )
    run_on(4, training.split())
    loss_by_step = losses(saved / "metrics.jsonl")
    assert loss_by_step[50] < 0.5 * loss_by_step[5], loss_by_step

    run(convert, "export", "--load", saved, "--save", tmp_path / "tuned", "--verify")
    expected = hf_tokens(tmp_path / "tuned")
    assert expected != hf_tokens(model)  # training has changed the text
    assert megatron_tokens(tmp_path / "tuned", tmp_path / "a.json") == expected
    assert megatron_tokens(saved, tmp_path / "b.json") == expected
    assert any(1 < len(ids) < 12 for ids in expected), "no text ended before the limit"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (model / name).read_bytes() == (tmp_path / "tuned" / name).read_bytes()


@pytest.mark.covers("Hugging Face")
def test_tokenizer_with_bos_matches_transformers(tmp_path: Path) -> None:
    folder, saved, leave_out = tmp_path / "model", tmp_path / "saved", f"--{LEAVE_OUT}"
    write_llama_tokenizer(folder)
    model = make_model("llama-3to1", vocab_size=300, bos_token_id=BOS, eos_token_id=EOS)
    save_folder(model, folder)
    expected, plain = hf_tokens(folder), hf_tokens(folder, add_special_tokens=False)
    assert not any(a == b for a, b in zip(expected, plain, strict=True)), "BOS changes nothing"
    out = tmp_path / "a.json"
    assert megatron_tokens(folder, out) == expected
    assert megatron_tokens(folder, out, leave_out) == plain
    run(convert, "import", "--hf", folder, "--save", tmp_path / "imported")
    assert megatron_tokens(tmp_path / "imported", out) == expected
    assert megatron_tokens(tmp_path / "imported", out, leave_out) == plain
    # Training that changes no weight, on files without special tokens: prompts get none either.
    (tmp_path / "a.txt").write_text(" ".join(WORDS) * 9)
    files = ("--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "data")
    assert preprocess_main([*map(str, files), "--tokenizer-model", str(folder), leave_out]) is None
    training = (
        f"--load-hf {folder} --data-path {tmp_path / 'data'} --split 100 --seq-length 16 "
        "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-30 --weight-decay 0 "
        f"--eval-interval 0 --save {saved}"
    ).split()
    assert pretrain(training, {}) == 2
    run(pretrain, *training, leave_out)
    assert megatron_tokens(saved, out) == plain
    assert megatron_tokens(saved, out, f"--no-{LEAVE_OUT}") == expected
