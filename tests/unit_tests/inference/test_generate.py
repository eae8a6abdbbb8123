# SPDX-License-Identifier: Apache-2.0
"""Texts to results: tokens, batches, empty prompts, the end of a document, refused prompts."""

from dataclasses import dataclass, field

import pytest
import torch

from megatron.cli.tokenizers import ByteTokenizer, Tokenizer
from megatron.core.inference.sampling import SamplingParams
from megatron.inference.generate import generate_texts, make_requests

GREEDY = SamplingParams(temperature=0)


class NextByte:
    """Find the byte after the last one most probable, and the end of the document after `z`."""

    def __init__(self) -> None:
        self.head = self

    def __call__(self, x: torch.Tensor, **context: object) -> torch.Tensor:
        if not context:  # as its own head
            return x
        following = torch.where(x.t() == ord("z"), 256, (x.t() + 1) % 256)
        return 5 * torch.nn.functional.one_hot(following, 257).float()

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@dataclass
class Loaded:
    """A loaded checkpoint without a checkpoint."""

    max_length: int = 16
    vocab_size: int = 257
    device: str = "cpu"
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    model: NextByte = field(default_factory=NextByte)
    stop_tokens: frozenset[int] = frozenset({256})


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_results_come_in_order_whatever_the_batch_size(batch_size: int) -> None:
    calls: list[tuple[int, str, bool]] = []
    results = generate_texts(
        Loaded(),
        ["ab", "xy", "m"],
        params=GREEDY,
        max_new_tokens=3,
        batch_size=batch_size,
        on_token=lambda i, ids, *, finished: (
            calls.append((i, bytes(ids[:4]).decode(), finished))
            if 256 not in ids
            else calls.append((i, "end", finished))
        ),
    )
    assert [(r.prompt, r.text, r.finish_reason) for r in results] == [
        ("ab", "cde", "length"),
        ("xy", "z", "stop"),
        ("m", "nop", "length"),
    ]
    assert results[0].prompt_ids == (97, 98)
    assert results[1].ids == (122, 256)
    assert [len(r.logprobs) for r in results] == [3, 2, 3]
    assert [c for c in calls if c[0] == 0] == [(0, "c", False), (0, "cd", False), (0, "cde", True)]
    assert (1, "end", True) in calls


def test_an_empty_prompt_starts_a_new_document() -> None:
    (request,) = make_requests(Loaded(), [""], 1)
    assert request.prompt == (256,)


def test_every_prompt_is_its_own_sequence() -> None:
    requests = make_requests(Loaded(), ["a", "a"], 1)
    assert [r.sequence for r in requests] == [0, 1]


def test_prompts_are_refused_before_anything_is_generated() -> None:
    with pytest.raises(ValueError, match="prompt 2 of 2 is too long: 14 tokens"):
        generate_texts(
            Loaded(),
            ["a", "b" * 14],
            params=GREEDY,
            max_new_tokens=3,
            batch_size=1,
            on_token=lambda *_, finished: pytest.fail("generated a token"),
        )
    with pytest.raises(ValueError, match="token id 195, outside the vocabulary of 128"):
        make_requests(Loaded(vocab_size=128), ["é"], 1)
