# SPDX-License-Identifier: Apache-2.0
"""The asynchronous loop of the engine: what it plans while a step runs, and what that wastes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.engine import Engine, EngineConfig, EngineFeatures, Request, generate
from megatron.core.inference.sampling import SamplingParams
from megatron.core.inference.speculation import DraftModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import (
    DRAWN,
    GREEDY,
    NEW,
    VOCABULARY,
    draft_model_of,
    engine_of,
    model_of,
    prompts,
    requests,
)
from tests.unit_tests.core.inference.test_speculation import half_right

PENALIZED = replace(DRAWN, presence_penalty=1.0)


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


class Counting(torch.nn.Module):
    """A model that says t + 1 after t, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def weights_replaced(self) -> None:
        pass

    def forward(self, x: torch.Tensor, **context: object) -> torch.Tensor:
        following = (x.t() + 1) % VOCABULARY
        return torch.nn.functional.one_hot(following, VOCABULARY).float()


class Watched(Counting):
    """One whose step ends when the next one is planned, if there is a next one."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps
        self.late = 0
        self.planned = threading.Semaphore(0)

    def forward(self, x: torch.Tensor, **context: object) -> torch.Tensor:
        self.left -= 1
        if self.left and not self.planned.acquire(timeout=20):
            self.late += 1
        return super().forward(x)


def counting(model: Counting | None = None, **more) -> Engine:
    return Engine(
        model or Counting(),
        EngineConfig(num_blocks=99, **{"asynchronous": True} | more),
        shapes=CacheShapes(),
        vocab_size=VOCABULARY,
    )


def test_a_step_is_planned_while_the_one_before_it_runs() -> None:
    model = Watched(NEW)
    engine = counting(model)
    launch = engine._launch

    def launched(plan, *rest):
        if engine._in_flight:
            model.planned.release()
        found = launch(plan)
        return found

    engine._launch = launched  # type: ignore[method-assign]
    asked = [Request(prompt=(n,), max_new_tokens=NEW, sampling=GREEDY) for n in range(16)]
    found = generate(engine, asked)
    assert [c.tokens for (c,) in found] == [
        [(n + k) % VOCABULARY for k in range(1, NEW + 1)] for n in range(16)
    ]
    assert model.late == 0
    assert engine.stats.steps == NEW
    assert engine.stats.overlapped >= 0.9 * engine.stats.steps
    assert engine.stats.wasted == 0  # the length of an output is known beforehand


def alternating(number: int) -> Callable[[Sequence[int]], torch.Tensor] | None:
    """Return a mask of odd and even tokens in turn for one request in three, else None."""
    if number % 3:
        return None
    return lambda tokens: torch.arange(VOCABULARY) % 2 == len(tokens) % 2


@pytest.mark.parametrize(
    ("family", "drafts"), [("gqa", False), ("hybrid", False), ("hybrid", True)]
)
def test_asynchronous_outputs_are_those_of_the_synchronous_loop(family: str, drafts: bool) -> None:
    model = model_of(family)
    asked = [
        replace(request, stop_tokens={n, n + 30}, n=2, sampling=params, mask=alternating(n))
        for n, (request, params) in enumerate(
            zip(requests(), [DRAWN, GREEDY, PENALIZED] * 2, strict=True)
        )
    ]
    found, right = [], {}
    for asynchronous in (False, True):
        proposer = half_right(right) if drafts and asynchronous else None
        engine = engine_of(
            model, proposer, asynchronous=asynchronous, num_blocks=6, max_num_batched_tokens=30
        )
        outputs = generate(engine, asked)
        right = {r.prompt: o[0].tokens for r, o in zip(asked, outputs, strict=True)}
        found.append([(c.tokens, c.finish_reason) for o in outputs for c in o])
        assert engine.scheduler.pool.references == 0
        assert engine.stats.preempted > 0
        assert engine.stats.hit > 0
    assert found[0] == found[1]
    stopped = sum(reason == "stop" for _, reason in found[0])
    assert engine.stats.wasted <= stopped
    assert engine.stats.wasted > 0 or drafts  # which are verified before anything else is planned
    assert (0 < engine.stats.accepted < engine.stats.drafted) == drafts


def test_an_abort_wastes_the_token_in_flight() -> None:
    engine = counting()
    gone, kept = [
        engine.add(Request(prompt=(n,), max_new_tokens=6, sampling=GREEDY)) for n in (1, 30)
    ]
    engine.step()
    (ended,) = engine.abort(gone)
    assert (ended.tokens, ended.finish_reason) == ([2], "abort")
    found = {c.request_id: c for _ in range(6) for c in engine.step()}
    assert set(found) == {kept}
    assert found[kept].tokens == [31, 32, 33, 34, 35, 36]
    assert ended.tokens == [2]
    assert engine.stats.wasted == 1
    assert engine.unfinished == engine.scheduler.pool.references == 0


def test_a_pause_waits_for_steps_in_flight_and_loses_none() -> None:
    engine = counting()
    engine.add(Request(prompt=(1,), max_new_tokens=5, sampling=GREEDY))
    engine.step()
    with pytest.raises(ValueError, match="pause"):
        engine.weights_replaced()
    engine.pause()
    engine.weights_replaced()
    (found,) = engine.step()
    assert (found.tokens, found.epochs) == ([2, 3], [0, 0])
    assert engine.step() == []
    engine.resume()
    while engine.unfinished:
        engine.step()
    assert (found.tokens, found.epochs) == ([2, 3, 4, 5, 6], [0, 0, 1, 1, 1])


def tokens_or_error(rank: int, world: int) -> tuple[list[list[int]], str]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    with one_thread():
        model = model_of("hybrid", groups)
        engine = Engine(
            model,
            EngineConfig(
                num_blocks=9, max_num_seqs=6, max_num_batched_tokens=30, asynchronous=True
            ),
            shapes=CacheShapes.from_modules(model.modules(), torch.float64),
            vocab_size=VOCABULARY,
            features=EngineFeatures(check_plans=groups["tp"]),
        )
        said = [c.tokens for (c,) in generate(engine, requests(DRAWN)[:3])]
        # Rank 1 is asked something else.
        prompt = prompts()[1][: 6 if rank else 7]
        try:
            generate(engine, [Request(prompt=prompt, sampling=SamplingParams(temperature=0))])
        except ValueError as error:
            return said, str(error)
    return said, ""


def test_ranks_plan_the_same_steps_or_end() -> None:
    engine = engine_of(model_of("hybrid"), max_num_batched_tokens=30, num_blocks=9)
    wanted = [c.tokens for (c,) in generate(engine, requests(DRAWN)[:3])]
    for said, error in run_ranks(tokens_or_error, 2):
        assert said == wanted
        assert "2 ranks" in error
        assert "\n" not in error


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sleep_gives_memory_back_and_texts_go_on_after_it(asynchronous: bool) -> None:
    model = model_of("hybrid")
    engine = engine_of(model, asynchronous=asynchronous)
    wanted = [c.tokens for (c,) in generate(engine, requests())]
    for request in requests():
        engine.add(request)
    found = {c.request_id: c for _ in range(3) for c in engine.step()}
    full, storages = engine.cache.num_bytes, [t.untyped_storage() for t in model.store.tensors()]
    before = sum(storage.nbytes() for storage in storages)
    assert full > 0
    assert before > 0
    engine.sleep(model.store.tensors())
    assert engine.cache.num_bytes == 0
    assert sum(storage.nbytes() for storage in storages) == 0
    for refused in (lambda: engine.add(requests()[0]), engine.sleep, engine.resume):
        with pytest.raises(ValueError, match="asleep"):
            refused()
    engine.step()  # what steps in flight had found
    assert engine.step() == []
    engine.wake()
    assert engine.cache.num_bytes == full
    assert sum(storage.nbytes() for storage in storages) == before
    while engine.unfinished:
        found |= {c.request_id: c for c in engine.step()}
    assert [found[n].tokens for n in sorted(found)] == wanted
    assert engine.stats.preempted > 0
    with pytest.raises(ValueError, match="awake"):
        engine.wake()


def test_engine_sleep_releases_draft_model_weights_too() -> None:
    model, smaller = model_of("gqa"), draft_model_of("gqa")
    engine = engine_of(model, DraftModel(engine_of(smaller), smaller.store.tensors))
    wanted = [c.tokens for (c,) in generate(engine, requests()[:2])]
    storages = [t.untyped_storage() for t in smaller.store.tensors()]
    before, accepted = [storage.nbytes() for storage in storages], engine.stats.accepted
    engine.sleep()
    assert [storage.nbytes() for storage in storages] == before
    engine.wake()
    engine.sleep(model.store.tensors())
    assert sum(storage.nbytes() for storage in storages) == 0 < sum(before)
    engine.wake()
    assert [c.tokens for (c,) in generate(engine, requests()[:2])] == wanted
    assert engine.stats.accepted > accepted > 0
