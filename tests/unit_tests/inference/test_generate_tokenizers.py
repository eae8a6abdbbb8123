# SPDX-License-Identifier: Apache-2.0
"""Generation works with every kind of tokenizer that a checkpoint can record."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron.cli.tokenizers import build_tokenizer, train_bpe
from megatron.inference.generate import main
from tests.support.commands import run
from tests.support.gpt_checkpoint import make_model, save

TEXTS = ["the theory of the thing", "a def is a def of a thing"] * 20


def make_tokenizer(kind: str, folder: Path) -> dict[str, Any]:
    """Make a tokenizer and return its record in a training checkpoint."""
    model, size = None, None
    if kind == "hf":
        model = str(folder / "tokenizer.json")
        train_bpe(TEXTS, 258, model)
    elif kind == "sentencepiece":
        model = str(folder / "tokenizer.model")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=str(folder / "tokenizer"),
            vocab_size=40, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    elif kind == "null":
        size = 200
    tokenizer = build_tokenizer(kind, model=model, vocab_size=size)  # type: ignore[arg-type]
    return {
        "type": kind, "model": model, "vocab_size": size, "eod": tokenizer.eod,
        "fingerprint": tokenizer.fingerprint,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["hf", "sentencepiece", "byte", "null"])
def test_every_tokenizer_continues_a_prompt(kind: str, tmp_path: Path) -> None:
    recorded = make_tokenizer(kind, tmp_path)
    save(tmp_path / "saved", make_model(), tokenizer=recorded)
    prompt = "7 8 9" if kind == "null" else "the thing"
    line = f"--load {tmp_path}/saved --device cpu --max-new-tokens 12 --temperature 0.8 --seed 3"
    line += f" --output-json {tmp_path}/out.json"
    code, out, err, _ = run(main, ["--prompt", prompt, *line.split()])
    assert code == 0, err
    (output,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    tokenizer = build_tokenizer(
        kind,
        model=recorded["model"],
        vocab_size=recorded["vocab_size"],  # type: ignore[arg-type]
    )
    assert output["prompt_ids"] == tokenizer.tokenize(prompt)
    assert len(output["ids"]) > 3
    assert out == f"{prompt}{output['text']}\n"
    full_text = tokenizer.detokenize([*output["prompt_ids"], *output["ids"]])
    assert prompt + output["text"] == full_text
