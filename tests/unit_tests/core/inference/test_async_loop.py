# SPDX-License-Identifier: Apache-2.0
"""The asynchronous engine loop: planning while a step runs, and wasted tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.inference import (
    Completions,
    Engine,
    EngineConfig,
    EngineRequest,
    SamplingParams,
    generate,
)
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.requests import RequestError
from megatron.core.inference.speculation import DraftModel
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.support.stub_model import StubModel
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
from tests.unit_tests.core.inference.test_speculation import flawed_proposer

PENALIZED = replace(DRAWN, presence_penalty=1.0)


class PacedModel(StubModel):
    """A counting model whose step ends only when the next step, if any, has been planned."""

    def __init__(self, steps: int) -> None:
        super().__init__(VOCABULARY)
        self.steps_left = steps
        self.num_late = 0
        self.planned = threading.Semaphore(0)

    def __call__(self, tokens: torch.Tensor, **context: object) -> torch.Tensor:
        self.steps_left -= 1
        if self.steps_left and not self.planned.acquire(timeout=20):
            self.num_late += 1
        return super().__call__(tokens)


def counting_engine(model: StubModel | None = None, **options) -> Engine:
    config = EngineConfig(num_blocks=99, **{"asynchronous": True} | options)
    return Engine(model or StubModel(VOCABULARY), config)


def test_next_step_is_planned_while_a_step_runs() -> None:
    model = PacedModel(NEW)
    engine = counting_engine(model)
    launch = engine.runner.launch

    def launch_and_signal(*args, **kwargs):
        if engine._in_flight:
            model.planned.release()
        outputs = launch(*args, **kwargs)
        return outputs

    engine.runner.launch = launch_and_signal  # type: ignore[method-assign]
    batch = [EngineRequest(prompt=(n,), max_new_tokens=NEW, sampling=GREEDY) for n in range(16)]
    outputs = generate(engine, batch)
    assert [c.tokens for (c,) in outputs] == [
        [(n + k) % VOCABULARY for k in range(1, NEW + 1)] for n in range(16)
    ]
    assert model.num_late == 0
    assert engine.stats.steps == NEW
    assert engine.stats.overlapped >= 0.9 * engine.stats.steps
    assert engine.stats.wasted == 0  # the scheduler knows the length of an output beforehand


def alternating(number: int) -> Callable[[Sequence[int]], torch.Tensor] | None:
    """Return a mask that allows odd and even tokens in turn for every third request, else None."""
    if number % 3:
        return None
    return lambda tokens: torch.arange(VOCABULARY) % 2 == len(tokens) % 2


@pytest.mark.parametrize(
    ("family", "drafts"), [("gqa", False), ("hybrid", False), ("hybrid", True)]
)
def test_asynchronous_outputs_equal_synchronous_ones(family: str, drafts: bool) -> None:
    model = model_of(family)
    batch = [
        replace(request, stop_tokens={n, n + 30}, n=2, sampling=params, mask=alternating(n))
        for n, (request, params) in enumerate(
            zip(requests(), [DRAWN, GREEDY, PENALIZED] * 2, strict=True)
        )
    ]
    outcomes, texts = [], {}
    for asynchronous in (False, True):
        proposer = flawed_proposer(texts) if drafts and asynchronous else None
        engine = engine_of(
            model, proposer, asynchronous=asynchronous, num_blocks=6, max_num_batched_tokens=30
        )
        outputs = generate(engine, batch)
        texts = {r.prompt: o[0].tokens for r, o in zip(batch, outputs, strict=True)}
        outcomes.append([(c.tokens, c.finish_reason) for o in outputs for c in o])
        assert engine.scheduler.kv_cache.pool.references == 0
        assert engine.stats.preempted > 0
        assert engine.stats.hit > 0
    assert outcomes[0] == outcomes[1]
    stopped = sum(reason == "stop" for _, reason in outcomes[0])
    assert engine.stats.wasted <= stopped
    assert engine.stats.wasted > 0 or drafts  # drafts are verified before the next plan
    assert (0 < engine.stats.accepted < engine.stats.drafted) == drafts


def test_an_abort_wastes_the_token_in_flight() -> None:
    engine = counting_engine()
    aborted_id, remaining_id = [
        engine.add(EngineRequest(prompt=(n,), max_new_tokens=6, sampling=GREEDY)) for n in (1, 30)
    ]
    outputs = Completions()
    outputs.add(engine.step())
    outputs.add(engine.abort(aborted_id))
    assert outputs[aborted_id, 0].finish_reason == "abort"
    for _ in range(6):
        outputs.add(engine.step())
    tokens = {request_id: output.tokens for (request_id, _), output in outputs.items()}
    assert tokens == {aborted_id: [2], remaining_id: [31, 32, 33, 34, 35, 36]}
    assert engine.stats.wasted == 1
    assert engine.unfinished == engine.scheduler.kv_cache.pool.references == 0


def test_pause_completes_the_steps_in_flight() -> None:
    engine = counting_engine()
    request_id = engine.add(EngineRequest(prompt=(1,), max_new_tokens=5, sampling=GREEDY))
    outputs = Completions()
    outputs.add(engine.step())
    with pytest.raises(ValueError, match="pause"):
        engine.weights_replaced()
    engine.pause()
    engine.weights_replaced()
    outputs.add(engine.step())
    output = outputs[request_id, 0]
    assert (output.tokens, output.epochs) == ([2, 3], [0, 0])
    assert engine.step() == []
    engine.resume()
    while engine.unfinished:
        outputs.add(engine.step())
    assert (output.tokens, output.epochs) == ([2, 3, 4, 5, 6], [0, 0, 1, 1, 1])


def test_an_abort_returns_the_tokens_of_finished_steps_first() -> None:
    engine = counting_engine()
    request_id = engine.add(EngineRequest(prompt=(1,), max_new_tokens=9, sampling=GREEDY))
    outputs = Completions()
    outputs.add(engine.step())
    engine.pause()  # finishes the second step, whose delta is not delivered yet
    outputs.add(engine.abort(request_id))
    assert outputs[request_id, 0].tokens == [2, 3]
    assert outputs[request_id, 0].finish_reason == "abort"
    assert engine.step() == []


def test_request_ids_of_the_caller_are_unique_while_unfinished() -> None:
    engine = counting_engine()
    request = EngineRequest(request_id=7, prompt=(1,), max_new_tokens=2, sampling=GREEDY)
    assert engine.add(request) == 7
    with pytest.raises(RequestError, match="7") as refusal:
        engine.add(request)
    assert refusal.value.field == "request_id"
    assert engine.add(replace(request, request_id=None)) == 8
    outputs = Completions()
    while engine.unfinished:
        outputs.add(engine.step())
    assert {key: output.tokens for key, output in outputs.items()} == {
        (7, 0): [2, 3],
        (8, 0): [2, 3],
    }
    assert engine.add(request) == 7  # finished, so the id is free again


def tokens_or_error(rank: int, world: int) -> tuple[list[list[int]], str]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    with one_thread():
        model = model_of("hybrid", groups)
        engine = Engine(
            model,
            EngineConfig(
                num_blocks=9, max_num_seqs=6, max_num_batched_tokens=30, asynchronous=True
            ),
            features=EngineFeatures(check_plans=groups["tp"]),
        )
        tokens = [c.tokens for (c,) in generate(engine, requests(DRAWN)[:3])]
        # Rank 1 receives another prompt.
        prompt = prompts()[1][: 6 if rank else 7]
        try:
            generate(engine, [EngineRequest(prompt=prompt, sampling=SamplingParams(temperature=0))])
        except ValueError as error:
            return tokens, str(error)
    return tokens, ""


def test_ranks_with_different_plans_fail() -> None:
    engine = engine_of(model_of("hybrid"), max_num_batched_tokens=30, num_blocks=9)
    expected = [c.tokens for (c,) in generate(engine, requests(DRAWN)[:3])]
    for tokens, error in run_ranks(tokens_or_error, 2):
        assert tokens == expected
        assert "2 ranks" in error
        assert "\n" not in error


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sleep_frees_memory_and_requests_resume(asynchronous: bool) -> None:
    model = model_of("hybrid")
    engine = engine_of(model, asynchronous=asynchronous)
    expected = [c.tokens for (c,) in generate(engine, requests())]
    for request in requests():
        engine.add(request)
    outputs = Completions()
    for _ in range(3):
        outputs.add(engine.step())
    full, storages = engine.cache.num_bytes, [t.untyped_storage() for t in model.store.tensors()]
    before = sum(storage.nbytes() for storage in storages)
    assert full > 0
    assert before > 0
    engine.sleep(model.store.tensors())
    assert engine.cache.num_bytes == 0
    assert sum(storage.nbytes() for storage in storages) == 0
    for call in (lambda: engine.add(requests()[0]), engine.sleep, engine.resume):
        with pytest.raises(ValueError, match="asleep"):
            call()
    outputs.add(engine.step())  # the deltas of the steps in flight
    assert engine.step() == []
    engine.wake()
    assert engine.cache.num_bytes == full
    assert sum(storage.nbytes() for storage in storages) == before
    while engine.unfinished:
        outputs.add(engine.step())
    assert [outputs[key].tokens for key in sorted(outputs)] == expected
    assert engine.stats.preempted > 0
    with pytest.raises(ValueError, match="awake"):
        engine.wake()


def test_engine_sleep_releases_draft_model_weights_too() -> None:
    model, draft_model = model_of("gqa"), draft_model_of("gqa")
    engine = engine_of(model, DraftModel(engine_of(draft_model), draft_model.store.tensors))
    expected = [c.tokens for (c,) in generate(engine, requests()[:2])]
    storages = [t.untyped_storage() for t in draft_model.store.tensors()]
    before, accepted = [storage.nbytes() for storage in storages], engine.stats.accepted
    engine.sleep()
    assert [storage.nbytes() for storage in storages] == before
    engine.wake()
    engine.sleep(model.store.tensors())
    assert sum(storage.nbytes() for storage in storages) == 0 < sum(before)
    engine.wake()
    assert [c.tokens for (c,) in generate(engine, requests()[:2])] == expected
    assert engine.stats.accepted > accepted > 0
