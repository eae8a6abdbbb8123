# SPDX-License-Identifier: Apache-2.0
"""The engine's bookkeeping by a model whose state is an exact hash of all tokens so far.

A token that is computed twice, left out, or given another row's state or place changes the text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.cache import CacheShapes, PagedCache
from megatron.core.inference.engine import Engine, EngineConfig, Request, generate
from megatron.core.inference.sampling import SamplingParams
from megatron.core.ssm.mixer import load_state, store_state

GREEDY = SamplingParams(temperature=0)
VOCABULARY, MODULUS = 53, 10_007
PROMPTS = [(7, 3, 52, 1, 2, 9, 4), (5,), (0, 11, 12), (44, 43, 42, 41, 40), (8, 8, 8)]
NEW = 9


def step(state, token, factor=37):
    """Return the state behind a token; no two orders of tokens are likely to agree."""
    return (factor * state + token + 1) % MODULUS


def expected(
    prompt: Sequence[int], new: int = NEW, stop: int | None = None, factor: int = 37
) -> list[int]:
    state, said = 0, []
    for token in prompt:
        state = step(state, token, factor)
    for _ in range(new):
        said.append(state % VOCABULARY)
        state = step(state, said[-1], factor)
        if said[-1] == stop:
            break
    return said


class Hashing:
    """Find that token most probable which the hash of all tokens so far names.

    The hash is kept by state slot, or of every token in a page, and read from there. Its only
    weight is `factor`.
    """

    def __init__(self, *, paged: bool = False) -> None:
        self.head, self.paged = self, paged
        self.pages: dict[int, int] = {}  # slot of the cache -> hash up to its token
        self.tokens, self.factor = 0, 37
        self.shapes = CacheShapes() if paged else CacheShapes(states={"hash": ((), torch.int64)})

    def weights_replaced(self) -> None:
        """Nothing is derived from the factor."""

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def __call__(
        self,
        tokens: torch.Tensor,
        *,
        layout: SequenceLayout,
        cache: PagedCache,
    ) -> torch.Tensor:
        rows, x = layout.rows_with_past, tokens[0].tolist()
        self.tokens += len(x)
        bounds = rows.batch.query_bounds.tolist()
        contexts = rows.batch.context_lengths.tolist()
        kept = None
        if not self.paged:
            kept = cache.buffer("hash", (), dtype=torch.int64, device=torch.device("cpu"))
            hashes = load_state(kept, rows.state_slots)
        found = torch.zeros(len(x), 1, dtype=torch.int64)
        for row, (first, last) in enumerate(pairwise(bounds)):
            assert layout.positions[first:last].tolist() == list(
                range(contexts[row] - (last - first), contexts[row])
            )
            state = int(hashes[row]) if kept is not None else self._before(rows, row, first, last)
            for place in range(first, last):
                state = step(state, x[place], self.factor)
                self.pages[int(rows.slot_mapping[place])] = state
                found[place] = state
            if kept is not None:
                hashes[row] = state
        if kept is not None:
            store_state(kept, rows.state_slots, hashes)
        return torch.nn.functional.one_hot(found % VOCABULARY, VOCABULARY).float()

    def _before(self, rows, row: int, first: int, last: int) -> int:
        place = int(rows.batch.context_lengths[row]) - (last - first) - 1
        if place < 0:
            return 0
        page = int(rows.batch.block_table[row, place // 16])
        return self.pages[page * 16 + place % 16]


def engine_of(model: Hashing, **config) -> Engine:
    config = EngineConfig(**{"num_blocks": 64, "max_num_seqs": 5} | config)
    return Engine(model, config, shapes=model.shapes, vocab_size=VOCABULARY)


def requests(prompts: Sequence[Sequence[int]] = PROMPTS, new: int = NEW, **more) -> list[Request]:
    return [
        Request(prompt=tuple(p), sequence=i, max_new_tokens=new, sampling=GREEDY, **more)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 7, 100])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_text_depends_on_the_prompt_alone(rows: int, budget: int, paged: bool) -> None:
    model = Hashing(paged=paged)
    engine = engine_of(model, max_num_seqs=rows, max_num_batched_tokens=budget)
    done = generate(engine, requests())
    assert [c.tokens for (c,) in done] == [expected(p) for p in PROMPTS]
    # Each token is computed once, but the last ones, which are never fed.
    assert model.tokens == engine.stats.computed == sum(len(p) + NEW - 1 for p in PROMPTS)


def test_rows_end_and_others_take_their_place() -> None:
    stop = expected(PROMPTS[0])[2]
    engine = engine_of(Hashing(), max_num_seqs=2)
    done = generate(engine, requests(stop_tokens=frozenset({stop})))
    assert [c.tokens for (c,) in done] == [expected(p, stop=stop) for p in PROMPTS]
    assert done[0][0].finish_reason == "stop"
    assert engine.scheduler.pool.references == 0


LONG = [tuple(random.Random(3).choices(range(VOCABULARY), k=70))]


def sharing(prefix: int, unique: int, count: int) -> list[tuple[int, ...]]:
    """Return prompts that begin with the same tokens and go on differently."""
    source = random.Random(prefix)
    start = tuple(source.choices(range(VOCABULARY), k=prefix))
    tails = [tuple(source.choices(range(VOCABULARY), k=unique)) for _ in range(count)]
    return [start + (n % VOCABULARY,) + tail[1:] for n, tail in enumerate(tails)]


@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize(
    ("prefix", "unique", "count"), [(100, 20, 4), (96, 5, 6), (15, 40, 3), (17, 1, 8)]
)
def test_a_shared_prefix_is_computed_once(prefix: int, unique: int, count: int, chunk: int) -> None:
    model = Hashing(paged=True)
    engine = engine_of(model, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=chunk)
    prompts = sharing(prefix, unique, count)
    done = generate(engine, requests(prompts, new=1))
    assert [c.tokens for (c,) in done] == [expected(p, 1) for p in prompts]
    saved = 16 * (prefix // 16)
    assert model.tokens == (prefix + unique) + (count - 1) * (prefix + unique - saved)
    assert engine.stats.hit == (count - 1) * saved
    assert engine.stats.queried == count * (prefix + unique)


@pytest.mark.parametrize(("prefix", "unique"), [(1600, 600), (1500, 700)])
def test_hybrids_go_on_from_states_inside_a_prompt(prefix: int, unique: int) -> None:
    """Requests that come one after the other, so where they part is not known before."""
    model = Hashing()
    engine = engine_of(model, num_blocks=1000, max_num_seqs=2)
    prompts, hits = sharing(prefix, unique, 4), []
    for prompt in prompts:
        before = engine.stats.hit
        ((done,),) = generate(engine, requests([prompt], new=20))
        assert done.tokens == expected(prompt, 20)
        hits.append(engine.stats.hit - before)
    assert hits[0] == 0
    assert hits[1] >= 0.8 * prefix  # a border spread over the first prompt
    assert hits[2:] == [16 * (prefix // 16)] * 2  # where the second parted from it
    assert engine.stats.restored == 3


def test_hybrids_that_come_together_part_where_they_do() -> None:
    model = Hashing()
    engine = engine_of(model, num_blocks=1000, max_num_seqs=4)
    prompts = sharing(500, 60, 4)
    done = generate(engine, requests(prompts))
    assert [c.tokens for (c,) in done] == [expected(p) for p in prompts]
    assert engine.stats.hit == 3 * 16 * (500 // 16)


def test_next_turn_reuses_blocks_of_generated_tokens() -> None:
    for model in (Hashing(), Hashing(paged=True)):
        engine = engine_of(model)
        ((first,),) = generate(engine, requests(LONG, new=40))
        # The last token was chosen and never computed.
        known = (len(LONG[0]) + 40 - 1) // 16 * 16
        turn = (*LONG[0], *first.tokens, 9, 8, 7)
        ((second,),) = generate(engine, requests([turn]))
        assert second.tokens == expected(turn)
        assert engine.stats.hit == known


def test_rows_that_give_up_their_blocks_come_to_the_same_end() -> None:
    for model in (Hashing(), Hashing(paged=True)):
        engine = engine_of(model, num_blocks=7, max_num_seqs=5)
        prompts = sharing(20, 20, 5)
        done = generate(engine, requests(prompts, new=60))
        assert [c.tokens for (c,) in done] == [expected(p, 60) for p in prompts]
        assert engine.stats.preempted > 0
        assert engine.scheduler.pool.references == 0


@pytest.mark.parametrize("seed", range(6))
def test_requests_come_and_go_at_any_time(seed: int) -> None:
    """Random arrivals, aborts, pauses and new weights: whoever ends has the right text."""
    source, paged = random.Random(seed), seed % 2 == 0
    model = Hashing(paged=paged)
    engine = engine_of(
        model,
        num_blocks=source.choice((9, 20, 60)),
        max_num_seqs=source.choice((1, 3, 8)),
        max_num_batched_tokens=source.choice((8, 16, 50)),
        prefix_caching=seed != 5,
    )
    start = source.choices(range(VOCABULARY), k=60)
    wanted: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    for _ in range(400):
        event = source.random()
        if event < 0.25 and len(wanted) < 60:
            prompt = (*start[: source.randrange(60)], *source.choices(range(9), k=3))
            (request,) = requests([prompt], new=source.randint(1, 40))
            wanted[engine.add(request)] = expected(prompt, request.max_new_tokens)
        elif event < 0.29 and wanted:
            for completion in engine.abort(source.choice(list(wanted))):
                ended[completion.request_id] = completion.finish_reason
        elif event < 0.31:
            engine.pause(keep_cache=source.random() < 0.5)
            assert engine.step() == []
            engine.resume()
        elif event < 0.33:
            engine.weights_replaced()
        else:
            finish(engine.step(), wanted, ended)
        check_books(engine)
    while engine.unfinished:
        finish(engine.step(), wanted, ended)
    assert set(ended) == set(wanted)
    assert {"abort", "length"} == set(ended.values())
    assert engine.scheduler.pool.references == 0
    engine.weights_replaced()  # what was kept for others goes as well
    assert engine.scheduler.pool.available == engine.config.num_blocks
    if not paged:
        assert engine.cache.states.free_slots == engine.cache.states.num_slots


def finish(found, wanted: dict[int, list[int]], ended: dict[int, str]) -> None:
    for completion in found:
        said = wanted[completion.request_id]
        assert completion.tokens == said[: len(completion.tokens)]
        if completion.finish_reason:
            assert completion.tokens == said
            ended[completion.request_id] = completion.finish_reason


def check_books(engine: Engine) -> None:
    """Every reference to a block is one of a running row, and every running row has a slot."""
    scheduler = engine.scheduler
    held = [block for row in scheduler.running for block in row.block_ids if block >= 0]
    assert scheduler.pool.references == len(held)
    unused = scheduler.pool.num_blocks - len(set(held))
    assert scheduler.pool.available == unused
    slots = [row.row for row in scheduler.running]
    assert len(set(slots)) == len(slots) <= scheduler.max_num_seqs
    assert all(row.row < 0 and not row.block_ids for row in scheduler.waiting)


def test_several_outputs_share_a_prompt() -> None:
    engine = engine_of(Hashing(paged=True))
    (request,) = requests(LONG, n=3)
    (done,) = generate(engine, [request])
    assert [c.index for c in done] == [0, 1, 2]
    assert [c.tokens for c in done] == [expected(LONG[0])] * 3
    assert engine.stats.hit == 2 * 64


def test_abort_frees_what_a_request_has_within_a_step() -> None:
    engine = engine_of(Hashing())
    first, second = (engine.add(request) for request in requests(LONG * 2))
    engine.step()
    assert engine.scheduler.pool.references > 0
    (ended,) = engine.abort(first)
    assert ended.finish_reason == "abort"
    engine.abort(second)
    assert engine.scheduler.pool.references == engine.unfinished == 0
    assert engine.abort(first) == []
    assert engine.step() == []


def test_tokens_say_which_weights_chose_them() -> None:
    engine = engine_of(Hashing(paged=True))
    engine.add(requests(LONG)[0])
    found = []
    for number in range(NEW):
        if number == 4:
            engine.weights_replaced()
        found = engine.step()
    assert found[0].epochs == [0] * 4 + [1] * 5
    generate(engine, requests(LONG))
    # Nothing that the old weights computed is found; what the new ones did is.
    assert engine.stats.hit == 0


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("budget", [16, 500])
def test_no_block_computed_across_weight_update_is_reused(paged: bool, budget: int) -> None:
    model = Hashing(paged=paged)
    engine = engine_of(model, max_num_batched_tokens=budget)
    first = engine.add(requests(LONG, new=60)[0])
    twin = engine.add(requests(LONG)[0])  # waits for what the first one is computing
    done = {}
    for number in range(80):
        if number == 3:
            model.factor = 41
            engine.weights_replaced()
        done |= {c.request_id: c.tokens for c in engine.step()}
    assert engine.unfinished == 0
    if budget == 16:  # the twin began after the replacement
        assert done[twin] == expected(LONG[0], factor=41)
    # The first row has filled blocks since, from keys and states of both weights.
    turn = (*LONG[0], *done[first], 1)
    hits = []
    for _ in range(2):
        before = engine.stats.hit
        ((found,),) = generate(engine, requests([turn]))
        assert found.tokens == expected(turn, factor=41)
        hits.append(engine.stats.hit - before)
    assert hits[0] <= 64  # what the twin computed
    assert hits[1] == 128
