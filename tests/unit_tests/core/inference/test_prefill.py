# SPDX-License-Identifier: Apache-2.0
"""The engine's bookkeeping, with a model whose state is an exact hash of all tokens so far.

A token that is computed twice, omitted, or given another row's state or position changes the text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference import (
    Completions,
    Engine,
    EngineConfig,
    EngineRequest,
    SamplingParams,
    generate,
)
from megatron.core.inference.cache import PagedCache
from megatron.core.ssm.mixer import load_state, store_state
from megatron.core.transformer import CacheShapes
from tests.support.stub_model import StubModel

GREEDY = SamplingParams(temperature=0)
VOCABULARY, MODULUS = 53, 10_007
PROMPTS = [(7, 3, 52, 1, 2, 9, 4), (5,), (0, 11, 12), (44, 43, 42, 41, 40), (8, 8, 8)]
NEW = 9


def step(state, token, factor=37):
    """Return the state after a token; different token orders are unlikely to agree."""
    return (factor * state + token + 1) % MODULUS


def expected_text(
    prompt: Sequence[int], new: int = NEW, stop: int | None = None, factor: int = 37
) -> list[int]:
    state, tokens = 0, []
    for token in prompt:
        state = step(state, token, factor)
    for _ in range(new):
        tokens.append(state % VOCABULARY)
        state = step(state, tokens[-1], factor)
        if tokens[-1] == stop:
            break
    return tokens


class HashModel(StubModel):
    """A model that predicts a token given by the hash of all tokens so far.

    The hash is kept in a state slot, or for every token in a page, and read back. Its only weight
    is `factor`.
    """

    def __init__(self, *, paged: bool = False) -> None:
        states = {} if paged else {"hash": ((), torch.int64)}
        super().__init__(VOCABULARY, cache_shapes=CacheShapes(states=states))
        self.paged = paged
        self.pages: dict[int, int] = {}  # slot of the cache -> hash up to its token
        self.tokens, self.factor = 0, 37

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
        state_buffer = None
        if not self.paged:
            state_buffer = cache.buffer("hash", (), dtype=torch.int64, device=torch.device("cpu"))
            hashes = load_state(state_buffer, rows.state_slots)
        hashes_out = torch.zeros(len(x), 1, dtype=torch.int64)
        for row, (start, end) in enumerate(pairwise(bounds)):
            assert layout.positions[start:end].tolist() == list(
                range(contexts[row] - (end - start), contexts[row])
            )
            state = (
                int(hashes[row])
                if state_buffer is not None
                else self._before(rows, row, start, end)
            )
            for index in range(start, end):
                state = step(state, x[index], self.factor)
                self.pages[int(rows.slot_mapping[index])] = state
                hashes_out[index] = state
            if state_buffer is not None:
                hashes[row] = state
        if state_buffer is not None:
            store_state(state_buffer, rows.state_slots, hashes)
        return torch.nn.functional.one_hot(hashes_out % VOCABULARY, VOCABULARY).float()

    def _before(self, rows, row: int, start: int, end: int) -> int:
        position = int(rows.batch.context_lengths[row]) - (end - start) - 1
        if position < 0:
            return 0
        page = int(rows.batch.block_table[row, position // 16])
        return self.pages[page * 16 + position % 16]


def engine_of(model: HashModel, **config) -> Engine:
    return Engine(model, EngineConfig(**{"num_blocks": 64, "max_num_seqs": 5} | config))


def requests(
    prompts: Sequence[Sequence[int]] = PROMPTS, new: int = NEW, **fields
) -> list[EngineRequest]:
    return [
        EngineRequest(prompt=tuple(p), sequence=i, max_new_tokens=new, sampling=GREEDY, **fields)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 7, 100])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_text_depends_only_on_the_prompt(rows: int, budget: int, paged: bool) -> None:
    model = HashModel(paged=paged)
    engine = engine_of(model, max_num_seqs=rows, max_num_batched_tokens=budget)
    completions = generate(engine, requests())
    assert [c.tokens for (c,) in completions] == [expected_text(p) for p in PROMPTS]
    # Each token is computed once, except the last token of a row, which is not fed back.
    assert model.tokens == engine.stats.computed == sum(len(p) + NEW - 1 for p in PROMPTS)


def test_waiting_requests_replace_finished_ones() -> None:
    stop = expected_text(PROMPTS[0])[2]
    engine = engine_of(HashModel(), max_num_seqs=2)
    completions = generate(engine, requests(stop_tokens=frozenset({stop})))
    assert [c.tokens for (c,) in completions] == [expected_text(p, stop=stop) for p in PROMPTS]
    assert completions[0][0].finish_reason == "stop"
    assert engine.scheduler.kv_cache.pool.references == 0


LONG = [tuple(random.Random(3).choices(range(VOCABULARY), k=70))]


def shared_prefix_prompts(prefix: int, unique: int, count: int) -> list[tuple[int, ...]]:
    """Return prompts that share a prefix and differ afterwards."""
    source = random.Random(prefix)
    start = tuple(source.choices(range(VOCABULARY), k=prefix))
    tails = [tuple(source.choices(range(VOCABULARY), k=unique)) for _ in range(count)]
    return [start + (n % VOCABULARY,) + tail[1:] for n, tail in enumerate(tails)]


@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize(
    ("prefix", "unique", "count"), [(100, 20, 4), (96, 5, 6), (15, 40, 3), (17, 1, 8)]
)
def test_a_shared_prefix_is_computed_once(prefix: int, unique: int, count: int, chunk: int) -> None:
    model = HashModel(paged=True)
    engine = engine_of(model, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=chunk)
    prompts = shared_prefix_prompts(prefix, unique, count)
    completions = generate(engine, requests(prompts, new=1))
    assert [c.tokens for (c,) in completions] == [expected_text(p, 1) for p in prompts]
    saved = 16 * (prefix // 16)
    assert model.tokens == (prefix + unique) + (count - 1) * (prefix + unique - saved)
    assert engine.stats.hit == (count - 1) * saved
    assert engine.stats.queried == count * (prefix + unique)


@pytest.mark.parametrize(("prefix", "unique"), [(1600, 600), (1500, 700)])
def test_hybrids_resume_from_snapshots_inside_a_prompt(prefix: int, unique: int) -> None:
    """Requests arrive one by one, so the end of their common prefix is not known in advance."""
    model = HashModel()
    engine = engine_of(model, num_blocks=1000, max_num_seqs=2)
    prompts, hits = shared_prefix_prompts(prefix, unique, 4), []
    for prompt in prompts:
        before = engine.stats.hit
        ((completion,),) = generate(engine, requests([prompt], new=20))
        assert completion.tokens == expected_text(prompt, 20)
        hits.append(engine.stats.hit - before)
    assert hits[0] == 0
    assert hits[1] >= 0.8 * prefix  # one of the snapshot positions in the first prompt
    assert (
        hits[2:] == [16 * (prefix // 16)] * 2
    )  # the end of the prefix shared by the second prompt
    assert engine.stats.restored == 3


def test_concurrent_hybrids_share_their_common_prefix() -> None:
    model = HashModel()
    engine = engine_of(model, num_blocks=1000, max_num_seqs=4)
    prompts = shared_prefix_prompts(500, 60, 4)
    completions = generate(engine, requests(prompts))
    assert [c.tokens for (c,) in completions] == [expected_text(p) for p in prompts]
    assert engine.stats.hit == 3 * 16 * (500 // 16)


def test_next_turn_reuses_blocks_of_generated_tokens() -> None:
    for model in (HashModel(), HashModel(paged=True)):
        engine = engine_of(model)
        ((previous,),) = generate(engine, requests(LONG, new=40))
        # The last token was chosen and never computed.
        cached = (len(LONG[0]) + 40 - 1) // 16 * 16
        turn = (*LONG[0], *previous.tokens, 9, 8, 7)
        ((completion,),) = generate(engine, requests([turn]))
        assert completion.tokens == expected_text(turn)
        assert engine.stats.hit == cached


def test_preempted_rows_generate_the_same_text() -> None:
    for model in (HashModel(), HashModel(paged=True)):
        engine = engine_of(model, num_blocks=7, max_num_seqs=5)
        prompts = shared_prefix_prompts(20, 20, 5)
        completions = generate(engine, requests(prompts, new=60))
        assert [c.tokens for (c,) in completions] == [expected_text(p, 60) for p in prompts]
        assert engine.stats.preempted > 0
        assert engine.scheduler.kv_cache.pool.references == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_request_events_keep_texts_correct(seed: int) -> None:
    """Random arrivals, aborts, pauses and new weights: each finished request has the right text."""
    source, paged = random.Random(seed), seed % 2 == 0
    model = HashModel(paged=paged)
    engine = engine_of(
        model,
        num_blocks=source.choice((9, 20, 60)),
        max_num_seqs=source.choice((1, 3, 8)),
        max_num_batched_tokens=source.choice((8, 16, 50)),
        prefix_caching=seed != 5,
    )
    start = source.choices(range(VOCABULARY), k=60)
    expected_tokens: dict[int, list[int]] = {}
    outputs = Completions()
    for _ in range(400):
        event = source.random()
        if event < 0.25 and len(expected_tokens) < 60:
            prompt = (*start[: source.randrange(60)], *source.choices(range(9), k=3))
            (request,) = requests([prompt], new=source.randint(1, 40))
            expected_tokens[engine.add(request)] = expected_text(prompt, request.max_new_tokens)
        elif event < 0.29 and expected_tokens:
            outputs.add(engine.abort(source.choice(list(expected_tokens))))
        elif event < 0.31:
            engine.pause(keep_cache=source.random() < 0.5)
            assert engine.step() == []
            engine.resume()
        elif event < 0.33:
            engine.weights_replaced()
        else:
            outputs.add(engine.step())
        check_accounting(engine)
    while engine.unfinished:
        outputs.add(engine.step())
    check_outputs(outputs, expected_tokens)
    assert engine.scheduler.kv_cache.pool.references == 0
    engine.weights_replaced()  # the prefix cache is emptied as well
    assert engine.scheduler.kv_cache.pool.available == engine.config.num_blocks
    if not paged:
        assert engine.cache.states.free_slots == engine.cache.states.num_slots


def check_outputs(outputs: Completions, expected_tokens: dict[int, list[int]]) -> None:
    assert {request_id for request_id, _ in outputs} == set(expected_tokens)
    for (request_id, _), output in outputs.items():
        tokens = expected_tokens[request_id]
        if output.finish_reason == "abort":
            tokens = tokens[: len(output.tokens)]
        assert output.tokens == tokens
    assert {output.finish_reason for output in outputs.values()} == {"abort", "length"}


def check_accounting(engine: Engine) -> None:
    """Check that only running rows refer to blocks, and that every running row has a slot."""
    scheduler = engine.scheduler
    for number, group in enumerate(scheduler.kv_cache.groups):
        rows = scheduler.running
        blocks_in_use = [block for row in rows for block in row.block_ids[number] if block >= 0]
        assert group.pool.references == len(blocks_in_use)
        assert group.pool.available == group.pool.num_blocks - len(set(blocks_in_use))
    slots = [row.row for row in scheduler.running]
    assert len(set(slots)) == len(slots) <= scheduler.max_num_seqs
    assert all(row.row < 0 and not row.block_ids for row in scheduler.waiting)


def test_several_outputs_share_a_prompt() -> None:
    engine = engine_of(HashModel(paged=True))
    (request,) = requests(LONG, n=3)
    (completions,) = generate(engine, [request])
    assert [c.index for c in completions] == [0, 1, 2]
    assert [c.tokens for c in completions] == [expected_text(LONG[0])] * 3
    assert engine.stats.hit == 2 * 64


def test_abort_frees_blocks_and_slots_at_once() -> None:
    engine = engine_of(HashModel())
    aborted_id, remaining_id = (engine.add(request) for request in requests(LONG * 2))
    engine.step()
    assert engine.scheduler.kv_cache.pool.references > 0
    (aborted,) = engine.abort(aborted_id)
    assert aborted.finish_reason == "abort"
    engine.abort(remaining_id)
    assert engine.scheduler.kv_cache.pool.references == engine.unfinished == 0
    assert engine.abort(aborted_id) == []
    assert engine.step() == []


def test_tokens_record_their_weight_epoch() -> None:
    engine = engine_of(HashModel(paged=True))
    request_id = engine.add(requests(LONG)[0])
    outputs = Completions()
    for number in range(NEW):
        if number == 4:
            engine.weights_replaced()
        outputs.add(engine.step())
    assert outputs[request_id, 0].epochs == [0] * 4 + [1] * 5
    generate(engine, requests(LONG))
    # Blocks computed with the old weights are never reused.
    assert engine.stats.hit == 0


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("budget", [16, 500])
def test_no_block_computed_across_weight_update_is_reused(paged: bool, budget: int) -> None:
    model = HashModel(paged=paged)
    engine = engine_of(model, max_num_batched_tokens=budget)
    original_id = engine.add(requests(LONG, new=60)[0])
    twin_id = engine.add(requests(LONG)[0])  # waits for the blocks of the first request
    outputs = Completions()
    for number in range(80):
        if number == 3:
            model.factor = 41
            engine.weights_replaced()
        outputs.add(engine.step())
    assert engine.unfinished == 0
    if budget == 16:  # the twin starts after the replacement
        assert outputs[twin_id, 0].tokens == expected_text(LONG[0], factor=41)
    # Since then the first row has filled blocks with keys and states of both weights.
    turn = (*LONG[0], *outputs[original_id, 0].tokens, 1)
    hits = []
    for _ in range(2):
        before = engine.stats.hit
        ((completion,),) = generate(engine, requests([turn]))
        assert completion.tokens == expected_text(turn, factor=41)
        hits.append(engine.stats.hit - before)
    assert hits[0] <= 64  # blocks of the twin
    assert hits[1] == 128
