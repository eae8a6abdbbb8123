# SPDX-License-Identifier: Apache-2.0
"""A model of transformers is fine-tuned on chats, exported, and says the same there and here."""

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
    "red",
    "blue",
    "green",
    "one",
    "two",
    "three",
    "up",
    "down",
    "left",
    "right",
    "north",
    "south",
]
LEAVE_OUT = "tokenizer-hf-no-include-special-tokens"
PROMPTS = ["user: red blue\nassistant: ", "user: one\nassistant: ", "left"]


def write_chats(path: Path) -> None:
    """Write conversations in which the assistant says the words of the user backwards."""
    choose = random.Random(5)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(200):
            said = choose.sample(WORDS, choose.randint(1, 4))
            messages = [
                {"role": "user", "content": " ".join(said)},
                {"role": "assistant", "content": " ".join(reversed(said))},
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
    for name, weight in model.named_parameters():  # as small as a model that is to be trained
        if "norm" not in name:
            weight.data.mul_(0.3)
    model.generation_config.eos_token_id = [tokenizer.eod, 3]
    return save_folder(model, folder)


def run(main: Any, *words: object) -> str:
    """Run an entry point, which must succeed, and return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words], {})
    assert code == 0, err.getvalue()
    return out.getvalue()


def our_tokens(folder: Path, path: Path, *options: str) -> list[list[int]]:
    """Return what `megatron.inference.generate` says to the prompts."""
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    words = ["--temperature", "0", "--max-new-tokens", "12", "--output-json", path]
    run(generate, "--load", folder, *prompts, *words, *options)
    return [result["ids"] for result in json.loads(path.read_text(encoding="utf-8"))]


def their_tokens(folder: Path, **options: bool) -> list[list[int]]:
    """Return what `transformers` says to the prompts, with its own tokenizer."""
    transformers = pytest.importorskip("transformers")
    model = load_folder(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    found = []
    with one_thread(), torch.no_grad():
        for text in PROMPTS:
            ids = tokenizer(text, return_tensors="pt", **options).input_ids
            said = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                pad_token_id=0,
            )
            found.append(said[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.covers("Hugging Face")
def test_from_transformers_through_fine_tuning_and_back(tmp_path: Path) -> None:
    model, data, saved = write_model(tmp_path / "model"), tmp_path / "talks", tmp_path / "saved"
    write_chats(tmp_path / "chats.jsonl")
    preprocess(
        PreprocessConfig(
            input=(str(tmp_path / "chats.jsonl"),),
            output_prefix=str(data),
            tokenizer_type="hf",
            tokenizer_model=str(model / "tokenizer.json"),
            chat=True,
            workers=1,
        )
    )
    training = (
        f"--load-hf {model} --sft --data-path {data} --split 100 --seq-length 64 "
        "--micro-batch-size 4 --global-batch-size 8 --train-iters 50 --lr 2e-2 --eval-interval 0 "
        "--log-interval 5 --lr-decay-style cosine --lr-warmup-iters 5 "
        "--tensor-model-parallel-size 2 "
        f"--sequence-parallel --use-distributed-optimizer --save {saved} --progress plain"
    )
    run_on(4, training.split())
    found = losses(saved / "metrics.jsonl")
    assert found[50] < 0.5 * found[5], found

    run(convert, "export", "--load", saved, "--save", tmp_path / "tuned", "--verify")
    expected = their_tokens(tmp_path / "tuned")
    assert expected != their_tokens(model)  # the training shows
    assert our_tokens(tmp_path / "tuned", tmp_path / "a.json") == expected
    assert our_tokens(saved, tmp_path / "b.json") == expected
    assert any(1 < len(ids) < 12 for ids in expected), "nothing was said that ended by itself"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (model / name).read_bytes() == (tmp_path / "tuned" / name).read_bytes()


@pytest.mark.covers("Hugging Face")
def test_a_tokenizer_with_bos_says_the_same_there_and_here(tmp_path: Path) -> None:
    folder, saved, leave_out = tmp_path / "model", tmp_path / "saved", f"--{LEAVE_OUT}"
    write_llama_tokenizer(folder)
    model = make_model("llama-3to1", vocab_size=300, bos_token_id=BOS, eos_token_id=EOS)
    save_folder(model, folder)
    wanted, plain = their_tokens(folder), their_tokens(folder, add_special_tokens=False)
    assert not any(a == b for a, b in zip(wanted, plain, strict=True)), "BOS changes nothing"
    out = tmp_path / "a.json"
    assert our_tokens(folder, out) == wanted
    assert our_tokens(folder, out, leave_out) == plain
    run(convert, "import", "--hf", folder, "--save", tmp_path / "imported")
    assert our_tokens(tmp_path / "imported", out) == wanted
    assert our_tokens(tmp_path / "imported", out, leave_out) == plain
    # A run that changes no weight, on files without special tokens: prompts get none either.
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
    assert our_tokens(saved, out) == plain
    assert our_tokens(saved, out, f"--no-{LEAVE_OUT}") == wanted
