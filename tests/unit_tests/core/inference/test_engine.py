# SPDX-License-Identifier: Apache-2.0
"""The decode loop around a scripted model: padding, positions, stopping, what is counted."""

import math
from typing import Any

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.cache import KVCache
from megatron.core.inference.engine import Request, check_requests, stream
from megatron.core.inference.sampling import SamplingParams
from tests.support.one_batch import generate

GREEDY = SamplingParams(temperature=0)
VOCABULARY = 11


class NextNumber:
    """Find the token after the last one most probable; record what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, SequenceLayout]] = []
        self.head = IdentityHead()

    def __call__(
        self, tokens: torch.Tensor, *, layout: SequenceLayout, cache: KVCache
    ) -> torch.Tensor:
        self.calls.append((tokens, layout))
        state = tokens.t()[:, :, None, None].float()  # [s, b, 1, 1]
        cache.extend(0, state, state)
        following = (tokens.t() + 1) % VOCABULARY
        return torch.nn.functional.one_hot(following, VOCABULARY).float()


class IdentityHead:
    """Take hidden states for logits; count the rows."""

    rows = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows += hidden.shape[0]
        return hidden

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def requests(*prompts: tuple[int, ...]) -> list[Request]:
    return [Request(prompt=p, sequence=i) for i, p in enumerate(prompts)]


def test_prompts_are_padded_on_the_left_and_positions_start_at_their_first_token() -> None:
    model = NextNumber()
    done = generate(model, requests((5, 6, 7), (2,)), max_new_tokens=3, sampling=GREEDY)
    assert [c.tokens for c in done] == [[8, 9, 10], [3, 4, 5]]
    assert [c.finish_reason for c in done] == ["length", "length"]
    layouts = [layout for _, layout in model.calls]
    assert [t.tolist() for t, _ in model.calls] == [[[5, 6, 7], [0, 0, 2]], [[8], [3]], [[9], [4]]]
    assert [x.positions.tolist() for x in layouts] == [[[0, 0], [1, 0], [2, 0]], [[3, 1]], [[4, 2]]]
    for step, layout in enumerate(layouts):
        assert layout.document_ids.tolist() == [[0, -1], [0, -1], [0, 0]] + [[0, 0]] * step


def test_only_the_last_token_of_a_prompt_is_projected_to_the_vocabulary() -> None:
    model = NextNumber()
    generate(model, requests((5, 6, 7), (2,)), max_new_tokens=4, sampling=GREEDY)
    assert model.head.rows == 4


def test_prompts_of_one_length_need_no_document_ids() -> None:
    model = NextNumber()
    generate(model, requests((5, 6), (2, 3)), max_new_tokens=2, sampling=GREEDY)
    assert [layout.document_ids for _, layout in model.calls] == [None, None]


def test_a_sequence_stops_at_the_stop_token_alone() -> None:
    model = NextNumber()
    done = generate(
        model, requests((1,), (6,), (3,)), max_new_tokens=6, sampling=GREEDY, stop_tokens=(8,)
    )
    assert [c.tokens for c in done] == [[2, 3, 4, 5, 6, 7], [7, 8], [4, 5, 6, 7, 8]]
    assert [c.finish_reason for c in done] == ["length", "stop", "stop"]
    assert [len(c.logprobs) for c in done] == [6, 2, 5]


def test_the_loop_ends_when_all_have_stopped() -> None:
    model = NextNumber()
    steps = list(
        stream(model, requests((6,), (7,)), max_new_tokens=50, sampling=GREEDY, stop_tokens=(8,))
    )
    assert len(steps) == len(model.calls) == 2


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    (done,) = generate(
        NextNumber(), requests((6,)), max_new_tokens=2, sampling=GREEDY, stop_tokens=(8,)
    )
    assert (done.tokens, done.finish_reason) == ([7, 8], "stop")


def test_one_new_token_takes_one_pass() -> None:
    model = NextNumber()
    (done,) = generate(model, requests((4, 5)), max_new_tokens=1, sampling=GREEDY)
    assert (done.tokens, done.finish_reason, len(model.calls)) == ([6], "length", 1)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=3)], ids=["greedy", "random"])
def test_a_diverged_model_is_an_error_and_not_text(params: SamplingParams) -> None:
    class Diverged(NextNumber):
        def __call__(self, tokens: torch.Tensor, **context: Any) -> torch.Tensor:
            logits = super().__call__(tokens, **context)
            if len(self.calls) == 3:
                logits[:, 1] = math.nan
            return logits

    with pytest.raises(ValueError, match="not finite at token 3 of sequence 2 of the batch"):
        generate(Diverged(), requests((1,), (5,)), max_new_tokens=5, sampling=params)


def test_generating_on_from_the_longer_prompt_draws_the_same_tokens() -> None:
    flat = SamplingParams(temperature=50.0, seed=3)
    (whole,) = generate(NextNumber(), requests((4, 5)), max_new_tokens=12, sampling=flat)
    (first,) = generate(NextNumber(), requests((4, 5)), max_new_tokens=5, sampling=flat)
    longer = requests((4, 5, *first.tokens))
    (rest,) = generate(NextNumber(), longer, max_new_tokens=7, sampling=flat)
    assert first.tokens + rest.tokens == whole.tokens
    assert len(set(whole.tokens)) > 4


@pytest.mark.parametrize(
    ("prompts", "new", "words"),
    [
        ([(1,)], 0, "max-new-tokens is 0"),
        ([(1,), ()], 5, "prompt 2 of 2 has no tokens"),
        ([(1,), (1, 2, 3)], 6, r"prompt 2 of 2 is too long: 3 tokens \+ 6 new .* limit of 8"),
        ([(1, 11)], 2, "prompt 1 of 1 has token id 11, outside the vocabulary of 11"),
        ([(-1,)], 2, "prompt 1 of 1 has token id -1"),
    ],
)
def test_impossible_requests_are_named(prompts: list, new: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_requests(requests(*prompts), max_new_tokens=new, max_length=8, vocab_size=VOCABULARY)


def test_requests_at_the_limit_pass() -> None:
    check_requests(requests((1, 10, 0)), max_new_tokens=5, max_length=8, vocab_size=VOCABULARY)
    check_requests(requests((1,)), max_new_tokens=500, max_length=None, vocab_size=VOCABULARY)
