# SPDX-License-Identifier: Apache-2.0
"""Data-parallel replicas of the engine: where requests go, and that they say what one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from megatron.core.device import Recorder
from megatron.core.inference import engine as engine_module
from megatron.core.inference.engine import generate
from megatron.core.inference.requests import Completion, Request
from megatron.core.inference.router import FIRST_BYTES, Replicas, RequestRouter, all_gather_json
from megatron.core.moe import dispatch
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import RowRuns
from tests.support.inputs import one_thread
from tests.support.ranks import RankFailure, run_ranks
from tests.support.strict_recorder import StrictRerun
from tests.unit_tests.core.inference.test_engine import DRAWN, GREEDY
from tests.unit_tests.core.inference.test_layouts import engine_on

BLOCK = 16
FIRST, SECOND = (5,) * 2 * BLOCK, (9,) * 2 * BLOCK


def router(replicas: int = 2, *, max_num_seqs: int = 4, num_blocks: int = 64) -> RequestRouter:
    return RequestRouter(
        replicas, max_num_seqs=max_num_seqs, block_size=BLOCK, num_blocks=num_blocks
    )


def ask(prompt: Sequence[int], new: int = 8, **more: Any) -> Request:
    return Request(prompt=tuple(prompt), max_new_tokens=new, sampling=GREEDY, **more)


def test_requests_without_shared_prefix_go_to_least_loaded() -> None:
    routes = router(3)
    long, short = ask([1] * 9, 30), ask([2] * 9, 3)
    assert [routes.assign(one) for one in (long, short, short, short, short)] == [0, 1, 2, 1, 2]
    routes.output_ended(0, long)
    assert routes.assign(short) == 0
    assert routes.requests == [2, 2, 2]


def test_a_prefix_goes_to_one_replica_while_that_has_a_free_row() -> None:
    routes = router(max_num_seqs=3)
    assert routes.assign(ask([*FIRST, 1])) == 0
    assert routes.assign(ask([*SECOND, 1])) == 1
    assert [routes.assign(ask([*FIRST, n])) for n in (2, 3)] == [0, 0]
    assert routes.matched == [2 * 2 * BLOCK, 0]
    # Of a longer beginning one block more was sent to the other: there is a row for it.
    assert routes.assign(ask([*FIRST, 4])) == 1
    assert routes.assign(ask([*FIRST, 5], n=2)) == 1  # no row anywhere: both know the prefix
    routes.output_ended(0, ask([*FIRST, 1]))
    assert routes.assign(ask([*SECOND, 2])) == 0  # a free row is worth more than a prefix


def test_of_two_beginnings_the_longer_one_counts() -> None:
    routes = router()
    assert routes.assign(ask(FIRST[:BLOCK])) == 0
    assert routes.assign(ask([7] * BLOCK)) == 1
    assert routes.assign(ask([*[7] * BLOCK, *FIRST])) == 1
    assert routes.assign(ask([*FIRST, *FIRST])) == 0


def test_as_many_blocks_are_remembered_as_a_cache_has() -> None:
    routes = router(1, num_blocks=3)
    for prompt, known in ((FIRST, 0), (SECOND, 0), (FIRST, BLOCK), (FIRST, 2 * BLOCK)):
        before = routes.matched[0]
        routes.assign(ask(prompt))
        assert routes.matched[0] - before == known, prompt
    routes.forget_prefixes()
    routes.assign(ask(FIRST))
    assert routes.matched[0] == 3 * BLOCK
    silent = router(1, num_blocks=0)
    silent.assign(ask(FIRST))
    silent.assign(ask(FIRST))
    assert silent.matched == [0]


#: Characters of the messages of two ranks.
LENGTHS = ((3, 0), (FIRST_BYTES, 3), (9, 2 * FIRST_BYTES), (FIRST_BYTES - 30, 1))


def message(rank: int, length: int) -> dict[str, Any]:
    return {"of": rank, "text": chr(233 + rank) * length}


def messages(rank: int, world: int) -> list[Any]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    return [all_gather_json(message(rank, n[rank]), groups["dp"]) for n in LENGTHS]


def test_messages_of_any_length_arrive() -> None:
    wanted = [[message(rank, n[rank]) for rank in range(2)] for n in LENGTHS]
    assert run_ranks(messages, 2) == [wanted, wanted]
    assert all_gather_json("alone", Group.single()) == ["alone"]


#: Prompts of two prefixes in turns, and others.
PROMPTS = [
    (*FIRST, 1, 2),
    (*SECOND, 3),
    (*FIRST, 4),
    (*SECOND, 5, 6, 7),
    (11, 12, 13),
    (*FIRST, 8),
    tuple(range(20, 45)),
]
STOPPED, ABORTED = 4, 6
"""Requests that the caller ends: after their third token, and after their second."""


def make_requests() -> list[Request]:
    found = [ask(prompt, 9, sequence=10 * n) for n, prompt in enumerate(PROMPTS)]
    found[0] = replace(found[0], sampling=replace(DRAWN, logprobs=2), n=2, prompt_logprobs=True)
    return [replace(found[n], sampling=DRAWN) if n == 3 else found[n] for n in range(len(found))]


def completions_of(replicas: Replicas) -> dict[tuple[int, int], Completion]:
    numbers = [replicas.add(request) for request in make_requests()]
    found = {}
    while replicas.unfinished:
        for completion in replicas.step():
            number = numbers.index(completion.request_id)
            found[number, completion.index] = completion
            if number == STOPPED and len(completion.tokens) == 3:
                replicas.finish(completion.request_id, completion.index)
            if number == ABORTED and len(completion.tokens) == 2:
                replicas.abort(completion.request_id)
    return found


def replicas_on(
    groups: ProcessGroupCollection,
    family: str,
    *,
    asynchronous: bool = False,
    make_recorder: Callable[[], Recorder] | None = None,
) -> Replicas:
    row = {"family": family, "forward": "local", "blocks": 64, "budget": 500}
    row |= {"prefix_caching": True, "asynchronous": asynchronous}
    engine = engine_on(groups, row, make_recorder=make_recorder)
    return Replicas(engine, groups.host_group("dp"))


def no_pickle(*_: object, **__: object) -> None:
    raise AssertionError("something was pickled")


def completions_on_a_rank(
    rank: int, world: int, family: str, grid: dict[str, int], asynchronous: bool = False
) -> tuple[Any, ...]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **grid), rank=rank)
    with one_thread():
        replicas = replicas_on(groups, family, asynchronous=asynchronous)
        objects = [n for n in vars(dist) if n.endswith(("_object", "_object_list"))]
        with (
            mock.patch.multiple("pickle", dumps=no_pickle, loads=no_pickle, Pickler=no_pickle),
            mock.patch.multiple(dist, **dict.fromkeys(objects, no_pickle)),
        ):
            found = completions_of(replicas)
        assert replicas.router is not None
        return found, replicas.router.requests, replicas.router.matched, replicas.stats()


def assert_as_one(found: dict[Any, Completion], wanted: dict[Any, Completion]) -> None:
    assert found.keys() == wanted.keys()
    for key, got in found.items():
        expected = wanted[key]
        for name in ("tokens", "finish_reason", "epochs", "index"):
            assert getattr(got, name) == getattr(expected, name), (key, name)
        for name in ("logprobs", "prompt_logprobs"):
            a, b = getattr(got, name), getattr(expected, name)
            assert a == b if b is None else a == pytest.approx(b, rel=1e-4, abs=1e-5), key
        for name in ("top_logprobs", "prompt_top_logprobs"):
            a, b = getattr(got, name), getattr(expected, name)
            ids = [one and [[i for i, _ in place] for place in one] for one in (a, b)]
            assert ids[0] == ids[1], (key, name)


@pytest.mark.parametrize(
    ("family", "asynchronous"), [("gqa", False), ("gqa", True), ("hybrid", True)]
)
def test_two_replicas_say_what_one_engine_does(family: str, asynchronous: bool) -> None:
    with one_thread():
        alone = replicas_on(ProcessGroupCollection.single(), family)
        wanted = completions_of(alone)
    assert wanted[STOPPED, 0].finish_reason == "stop"
    assert wanted[ABORTED, 0].finish_reason == "abort"
    for found, sent, matched, stats in run_ranks(
        completions_on_a_rank, 2, family, {}, asynchronous
    ):
        assert_as_one(found, wanted)
        assert sent == [3, 4]
        assert matched == [2 * 2 * BLOCK, 2 * BLOCK]  # each prefix was sent to one of them
        assert all(one.steps > 0 for one in stats)
        assert all((one.overlapped > 0) == asynchronous for one in stats)
        assert all(one.wasted <= 3 for one in stats)  # of what was ended from outside
        # What was computed twice by none: as many tokens as in one engine come from the cache.
        total = stats[0] + stats[1]
        assert (total.hit, total.queried) == (alone.engine.stats.hit, alone.engine.stats.queried)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "asynchronous"), [({"tp": 2}, False), ({"tp": 2}, True), ({"pp": 2}, False)]
)
def test_replicas_of_several_ranks_say_what_one_engine_does(
    grid: dict[str, int], asynchronous: bool
) -> None:
    with one_thread():
        wanted = completions_of(replicas_on(ProcessGroupCollection.single(), "gqa"))
    for found, sent, _, _ in run_ranks(completions_on_a_rank, 4, "gqa", grid, asynchronous):
        assert_as_one(found, wanted)
        assert min(sent) > 0


def expert_requests() -> list[Request]:
    """Return a request of two rows, and a longer one of one."""
    return [ask([7, 8, 9, *[n] * 30], 5 + 20 * n, n=2 - n) for n in range(2)]


def counts_read_by_a_kernel(runs: RowRuns) -> tuple[int, ...]:
    """Return the rows of each run as a GPU's grouped product reads them: not through the host. The
    product on a CPU is no kernel and asks for them."""
    ends = np.from_dlpack(runs.ends).tolist()
    return tuple(end - start for start, end in pairwise((0, *ends)))


def experts_on_a_rank(
    rank: int, world: int, least: int, asynchronous: bool, recorded: bool
) -> tuple[Any, ...]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=world), rank=rank)
    asked_twice = expert_requests()
    with (
        one_thread(),
        mock.patch.object(dispatch, "MAX_PADDED_ROWS", least),
        mock.patch.object(engine_module, "MAX_PADDED_ROWS", least),
        mock.patch.object(RowRuns, "counts", property(counts_read_by_a_kernel)),
    ):
        found = []
        for part in (asked_twice, asked_twice[:1]):  # one replica ends sooner, then one is idle
            recorder = StrictRerun if recorded else None
            more = {"asynchronous": asynchronous, "make_recorder": recorder}
            replicas = replicas_on(groups, "experts", **more)
            numbers = [replicas.add(request) for request in part]
            ended = {}
            while replicas.unfinished:
                ended |= {c.request_id: c for c in replicas.step() if c.index == 0}
            found.append([ended[number] for number in numbers])
        replicas.engine.drain()
        engine = replicas.engine
        replayed = engine.graphs.replayed if engine.graphs is not None else 0
        return found, engine.joined, engine.stats.steps, replayed, engine.stats.overlapped


@pytest.mark.parametrize(
    ("least", "asynchronous", "recorded"),
    [
        pytest.param(0, False, False, id="exact"),
        pytest.param(dispatch.MAX_PADDED_ROWS, False, False, id="padded"),
        pytest.param(0, True, False, id="exact, asynchronous"),
        pytest.param(dispatch.MAX_PADDED_ROWS, True, True, id="graphs, asynchronous"),
        pytest.param(1, False, True, id="graphs of one row, exact ones of two"),
    ],
)
def test_an_idle_replica_computes_the_experts_that_it_has(
    least: int, asynchronous: bool, recorded: bool
) -> None:
    with one_thread():
        engine = replicas_on(ProcessGroupCollection.single(), "experts").engine
        wanted = generate(engine, expert_requests())
    ranks = run_ranks(experts_on_a_rank, 2, least, asynchronous, recorded)
    for found, *_ in ranks:
        assert_as_one(
            {(n, 0): c for n, c in enumerate([*found[0], *found[1]])},
            {(n, 0): c[0] for n, c in enumerate([*wanted, wanted[0]])},
        )
    (_, joined, steps, replayed, ahead), (_, joined_1, steps_1, replayed_1, _) = ranks
    assert (joined, steps_1) == (0, 0)
    assert joined_1 == steps > 0
    assert replayed == replayed_1
    if recorded and least == 1:  # a step of two rows reads on the host, and is no graph
        assert 0 < replayed < steps - 1
    else:
        assert replayed == (steps - 1 if recorded else 0)  # all but that of the prompt
    assert (ahead > 0) == asynchronous


def differing_on_a_rank(rank: int, world: int) -> str:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    replicas = replicas_on(groups, "gqa")
    assert replicas.router is not None
    if rank:  # planted: it sees no prefix
        replicas.router._num_shared_blocks = lambda sent, hashes: 0
    return str(completions_of(replicas))


def test_ranks_that_assign_requests_differently_stop() -> None:
    with pytest.raises(RankFailure, match="have assigned requests differently"):
        run_ranks(differing_on_a_rank, 2)
