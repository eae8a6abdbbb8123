# SPDX-License-Identifier: Apache-2.0
"""Greedy generation by the command from a checkpoint of random weights, and its references."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import (
    Coordinator,
    Solo,
    TensorChunk,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.models import GPTModel
from megatron.inference.generate import main
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator, one_thread

PROMPTS = ("Once", "", "two words é", "ab")
NUM_NEW = 9
BYTES = {"type": "byte", "model": None, "vocab_size": 257, "fingerprint": "byte-257"}


def fill_weights(model: GPTModel, scale: float) -> list[TensorChunk]:
    """Fill the weights with slices of random logical tensors, on any rank grid; return the chunks.

    Args:
        model: the model.
        scale: standard deviation of matrices; larger values magnify rounding.
    """
    chunks = weight_chunks(model.store)
    for chunk in chunks:
        noise = torch.randn(chunk.shape, generator=generator(7, *chunk.name.encode()))
        values = scale * noise
        if "norm" in chunk.name:
            values = 1.0 + 0.2 * noise
        elif "A_log" in chunk.name:
            values = 0.3 * noise - 1.5
        extents = zip(chunk.offsets, chunk.tensor.shape, strict=True)
        slices = tuple(slice(offset, offset + size) for offset, size in extents)
        chunk.tensor.copy_(values[slices])
    return chunks


def save_filled(
    root: str | Path, model: GPTModel, scale: float, coordinator: Coordinator | None = None
) -> None:
    """Fill the weights and save them as training on these ranks does, including MTP layers."""
    extra = {
        "model": json.loads(json.dumps(model.config.to_json())),
        "config": {"bf16": False, "max-position-embeddings": 40},
        "tokenizer": BYTES,
    }
    save_checkpoint(root, 7, fill_weights(model, scale), extra, coordinator=coordinator or Solo())


def arguments(load: Path, output: Path, *extra: str) -> list[str]:
    """Return the words of the command for `PROMPTS`."""
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    flags = ["--max-new-tokens", str(NUM_NEW), "--temperature", "0", "--device", "cpu", *extra]
    return [*prompts, "--load", str(load), "--output-json", str(output), *flags]


def run(words: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run the command in this process; return its exit code and stderr."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err), one_thread():
        code = main(words, environment)
    return code, err.getvalue()


def read_outputs(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def outputs_of(words: Sequence[str], path: Path) -> list[dict[str, Any]]:
    """Run the command, which must succeed, and return the outputs that it writes to a path."""
    code, err = run(words, {})
    assert code == 0, err
    return read_outputs(path)


def assert_same_outputs(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a["ids"] == b["ids"]
        actual_logprobs, expected_logprobs = (torch.tensor(r["logprobs"]) for r in (a, b))
        assert_close_by_metric(a["prompt"], actual_logprobs, expected_logprobs)


def assert_argmax_of_full_forward(outputs: list[dict[str, Any]], model: GPTModel) -> None:
    """Compare tokens and log-probabilities with a full forward of each text alone, uncached."""
    distinct = set()
    for output in outputs:
        tokens = output["prompt_ids"] + output["ids"]
        with torch.no_grad(), one_thread():
            logits = model.full_logits(torch.tensor([tokens])).squeeze(1)
        logits = logits[len(output["prompt_ids"]) - 1 : -1]
        assert logits.argmax(-1).tolist() == output["ids"]
        expected = logits.log_softmax(-1).amax(-1)
        assert_close_by_metric(output["prompt"], torch.tensor(output["logprobs"]), expected)
        distinct |= set(output["ids"])
    assert len(distinct) > 8
