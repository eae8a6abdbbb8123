# SPDX-License-Identifier: Apache-2.0
"""How prompts reach recurrent mixers, in parts and padded: a model whose state is an exact hash."""

from itertools import pairwise

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.cache import BatchCache, StateCache
from megatron.core.inference.engine import Request, stream
from megatron.core.inference.sampling import SamplingParams
from megatron.core.ssm.mixer import carried, keep
from tests.support.one_batch import generate

GREEDY = SamplingParams(temperature=0)
VOCABULARY, MODULUS = 53, 10_007
PROMPTS = [(7, 3, 52, 1, 2, 9, 4), (5,), (0, 11, 12), (44, 43, 42, 41, 40), (8, 8, 8)]
NEW = 9


def step(state, token):
    """Return the state behind a token; no two orders of tokens are likely to agree."""
    return (37 * state + token + 1) % MODULUS


def expected(prompt: tuple[int, ...], stop: int | None = None) -> list[int]:
    state, said = 0, []
    for token in prompt:
        state = step(state, token)
    for _ in range(NEW):
        said.append(state % VOCABULARY)
        state = step(state, said[-1])
        if said[-1] == stop:
            break
    return said


class Hashing:
    """Find that token most probable which the hash of all tokens so far names; kept by slot."""

    def __init__(self) -> None:
        self.head, self.calls, self.addresses = self, [], set()

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def __call__(
        self,
        tokens: torch.Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: BatchCache | None = None,
    ) -> torch.Tensor:
        if layout is None:  # as its own head
            return tokens
        x = tokens.t()  # [s, b]
        state = cache.buffer("hash", (), dtype=torch.int64, device=x.device)
        self.addresses.add(state.data_ptr())
        self.calls.append((len(x), cache.slots.tolist()))
        assert (layout.document_ids is None) or len(layout.document_ids) >= len(x)
        hashes = carried(state, cache.slots)
        if len(x) == 1:  # every row has a new token, or none at all
            hashes = step(hashes, x[0])
            keep(state, cache.slots, hashes)
            found = hashes[None]
        else:
            rows = cache.new_tokens(len(x))
            packed, bounds = rows.pack(x), rows.sequences.bounds
            out = torch.zeros_like(packed)
            for row, (first, last) in enumerate(pairwise(bounds)):
                for place in range(first, last):
                    hashes[row] = step(hashes[row], packed[place])
                    out[place] = hashes[row]
            keep(state, cache.slots, hashes)
            found = rows.unpack(out)
        return torch.nn.functional.one_hot(found % VOCABULARY, VOCABULARY).float()


def requests(prompts: list[tuple[int, ...]] = PROMPTS) -> list[Request]:
    return [Request(prompt=p, sequence=i) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 6, 7, 100])
def test_text_depends_on_the_prompt_alone(chunk: int | None) -> None:
    model = Hashing()
    done = generate(
        model, requests(), max_new_tokens=NEW, sampling=GREEDY, prefill_chunk_tokens=chunk
    )
    assert [c.tokens for c in done] == [expected(p) for p in PROMPTS]
    assert len(model.addresses) == 1
    parts = [length for length, _ in model.calls[: -NEW + 1]]
    assert sum(parts) == 7
    assert max(parts) == min(chunk or 7, 7)
    assert len(parts) == -(-7 // (chunk or 7))


def test_rows_have_no_slot_in_a_part_of_padding_alone() -> None:
    model = Hashing()
    done = generate(model, requests(), max_new_tokens=2, sampling=GREEDY, prefill_chunk_tokens=1)
    assert [c.tokens for c in done] == [expected(p)[:2] for p in PROMPTS]
    has_slot = [[slot >= 0 for slot in slots] for _, slots in model.calls]
    for column in range(7):  # of padded prompts
        assert has_slot[column] == [column >= 7 - len(p) for p in PROMPTS]


def test_a_sequence_that_has_ended_has_no_slot_and_the_others_go_on() -> None:
    stop = expected(PROMPTS[0])[2]
    states, model = StateCache(len(PROMPTS)), Hashing()
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "stop_tokens": (stop,), "states": states}
    steps = stream(model, requests(), **options)
    for number, done in enumerate(steps, 1):
        if number == 5:
            assert model.calls[-1][1][0] == -1
            assert states.free_slots == sum(bool(c.finish_reason) for c in done) == 1
    assert [c.tokens for c in done] == [expected(p, stop) for p in PROMPTS]
    assert states.free_slots == len(PROMPTS)


def test_slots_serve_batch_after_batch() -> None:
    states, model = StateCache(2), Hashing()
    for first in range(0, len(PROMPTS), 2):
        batch = requests(PROMPTS)[first : first + 2]
        done = generate(model, batch, max_new_tokens=NEW, sampling=GREEDY, states=states)
        assert [c.tokens for c in done] == [expected(r.prompt) for r in batch]
    assert len(model.addresses) == 1
    with pytest.raises(ValueError, match="5 sequences, but 2 of 2 slots are free"):
        generate(model, requests(), max_new_tokens=1, sampling=GREEDY, states=states)


def test_a_stream_that_is_left_early_frees_its_slots() -> None:
    states = StateCache(len(PROMPTS))
    steps = stream(Hashing(), requests(), max_new_tokens=NEW, sampling=GREEDY, states=states)
    next(steps)
    assert states.free_slots == 0
    steps.close()
    assert states.free_slots == len(PROMPTS)
