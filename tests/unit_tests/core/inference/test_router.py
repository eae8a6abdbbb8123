# SPDX-License-Identifier: Apache-2.0
"""Data-parallel replicas of the engine: routing, and outputs equal to one engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.device import Recorder
from megatron.core.inference import Completion, Completions, EngineRequest, generate, model_runner
from megatron.core.inference.router import FIRST_BYTES, Replicas, RequestRouter, all_gather_json
from megatron.core.moe import dispatch
from megatron.core.weight_gather import RowRuns
from tests.support.inputs import one_thread
from tests.support.one_batch import assert_same_completion
from tests.support.ranks import RankFailure, run_ranks
from tests.support.strict_recorder import StrictRerun
from tests.unit_tests.core.inference.test_engine import DRAWN, GREEDY
from tests.unit_tests.core.inference.test_layouts import engine_on

BLOCK = 16
PREFIX_A, PREFIX_B = (5,) * 2 * BLOCK, (9,) * 2 * BLOCK


def router(replicas: int = 2, *, max_num_seqs: int = 4, num_blocks: int = 64) -> RequestRouter:
    return RequestRouter(
        replicas, max_num_seqs=max_num_seqs, block_size=BLOCK, num_blocks=num_blocks
    )


def make_request(prompt: Sequence[int], new: int = 8, **fields: Any) -> EngineRequest:
    return EngineRequest(prompt=tuple(prompt), max_new_tokens=new, sampling=GREEDY, **fields)


def test_requests_without_shared_prefix_go_to_least_loaded() -> None:
    routes = router(3)
    long, short = make_request([1] * 9, 30), make_request([2] * 9, 3)
    assert [routes.assign(request) for request in (long, short, short, short, short)] == [
        0,
        1,
        2,
        1,
        2,
    ]
    routes.output_ended(0, long)
    assert routes.assign(short) == 0
    assert routes.requests == [2, 2, 2]


def test_prefix_goes_to_its_replica_while_a_row_is_free() -> None:
    routes = router(max_num_seqs=3)
    assert routes.assign(make_request([*PREFIX_A, 1])) == 0
    assert routes.assign(make_request([*PREFIX_B, 1])) == 1
    assert [routes.assign(make_request([*PREFIX_A, n])) for n in (2, 3)] == [0, 0]
    assert routes.matched == [2 * 2 * BLOCK, 0]
    # The other replica has received one more block of this prefix, and has a free row.
    assert routes.assign(make_request([*PREFIX_A, 4])) == 1
    assert (
        routes.assign(make_request([*PREFIX_A, 5], n=2)) == 1
    )  # no free row anywhere: both replicas have the prefix
    routes.output_ended(0, make_request([*PREFIX_A, 1]))
    assert (
        routes.assign(make_request([*PREFIX_B, 2])) == 0
    )  # a free row is worth more than a prefix


def test_longer_prefix_match_wins() -> None:
    routes = router()
    assert routes.assign(make_request(PREFIX_A[:BLOCK])) == 0
    assert routes.assign(make_request([7] * BLOCK)) == 1
    assert routes.assign(make_request([*[7] * BLOCK, *PREFIX_A])) == 1
    assert routes.assign(make_request([*PREFIX_A, *PREFIX_A])) == 0


def test_router_remembers_as_many_blocks_as_the_cache() -> None:
    routes = router(1, num_blocks=3)
    for prompt, matched in ((PREFIX_A, 0), (PREFIX_B, 0), (PREFIX_A, BLOCK), (PREFIX_A, 2 * BLOCK)):
        before = routes.matched[0]
        routes.assign(make_request(prompt))
        assert routes.matched[0] - before == matched, prompt
    routes.forget_prefixes()
    routes.assign(make_request(PREFIX_A))
    assert routes.matched[0] == 3 * BLOCK
    silent = router(1, num_blocks=0)
    silent.assign(make_request(PREFIX_A))
    silent.assign(make_request(PREFIX_A))
    assert silent.matched == [0]


#: Number of characters of the messages of two ranks.
LENGTHS = ((3, 0), (FIRST_BYTES, 3), (9, 2 * FIRST_BYTES), (FIRST_BYTES - 30, 1))


def message(rank: int, length: int) -> dict[str, Any]:
    return {"rank": rank, "text": chr(233 + rank) * length}


def messages(rank: int, world: int) -> list[Any]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    return [all_gather_json(message(rank, n[rank]), groups["dp"]) for n in LENGTHS]


def test_json_gather_handles_any_length() -> None:
    expected = [[message(rank, n[rank]) for rank in range(2)] for n in LENGTHS]
    assert run_ranks(messages, 2) == [expected, expected]
    assert all_gather_json("alone", Group.single()) == ["alone"]


#: Prompts that alternate between two prefixes, and others.
PROMPTS = [
    (*PREFIX_A, 1, 2),
    (*PREFIX_B, 3),
    (*PREFIX_A, 4),
    (*PREFIX_B, 5, 6, 7),
    (11, 12, 13),
    (*PREFIX_A, 8),
    tuple(range(20, 45)),
]
STOPPED, ABORTED = 4, 6
"""Requests that the caller ends after their third and after their second token."""


def make_requests() -> list[EngineRequest]:
    batch = [make_request(prompt, 9, sequence=10 * n) for n, prompt in enumerate(PROMPTS)]
    batch[0] = replace(batch[0], sampling=replace(DRAWN, logprobs=2), n=2, prompt_logprobs=True)
    return [replace(batch[n], sampling=DRAWN) if n == 3 else batch[n] for n in range(len(batch))]


def completions_of(replicas: Replicas) -> Completions:
    for request in make_requests():
        replicas.add(request)
    completions = Completions()
    while replicas.unfinished:
        for delta in replicas.step():
            completions.add([delta])
            num_tokens = len(completions[delta.request_id, delta.index].tokens)
            if delta.request_id == STOPPED and num_tokens == 3:
                replicas.finish(delta.request_id, delta.index)
            if delta.request_id == ABORTED and num_tokens == 2:
                completions.add(replicas.abort(delta.request_id))
    return completions


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


def completions_on_rank(
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
            completions = completions_of(replicas)
        assert replicas.router is not None
        return completions, replicas.router.requests, replicas.router.matched, replicas.stats()


def assert_same_completions(
    actual: dict[Any, Completion], expected_completions: dict[Any, Completion]
) -> None:
    assert actual.keys() == expected_completions.keys()
    for key, got in actual.items():
        assert_same_completion(got, expected_completions[key])


@pytest.mark.parametrize(
    ("family", "asynchronous"), [("gqa", False), ("gqa", True), ("hybrid", True)]
)
def test_two_replicas_match_one_engine(family: str, asynchronous: bool) -> None:
    with one_thread():
        single = replicas_on(ProcessGroupCollection.single(), family)
        expected = completions_of(single)
    assert len(expected[STOPPED, 0].tokens) == 3
    assert expected[ABORTED, 0].finish_reason == "abort"
    for completions, sent, matched, stats in run_ranks(
        completions_on_rank, 2, family, {}, asynchronous
    ):
        assert_same_completions(completions, expected)
        assert sent == [3, 4]
        assert matched == [2 * 2 * BLOCK, 2 * BLOCK]  # each prefix was sent to a single replica
        assert all(replica_stats.steps > 0 for replica_stats in stats)
        # The next step is in flight when the caller ends a request, whether it still runs or not.
        wasted = [replica_stats.wasted for replica_stats in stats]
        assert (sum(wasted) > 0) == asynchronous
        assert max(wasted) <= 3  # tokens of requests that the caller ended
        # No prefix is computed twice: as many tokens as in one engine come from the cache.
        total = stats[0] + stats[1]
        assert (total.hit, total.queried) == (single.engine.stats.hit, single.engine.stats.queried)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "asynchronous"), [({"tp": 2}, False), ({"tp": 2}, True), ({"pp": 2}, False)]
)
def test_multi_rank_replicas_match_one_engine(grid: dict[str, int], asynchronous: bool) -> None:
    with one_thread():
        expected = completions_of(replicas_on(ProcessGroupCollection.single(), "gqa"))
    for completions, sent, _, _ in run_ranks(completions_on_rank, 4, "gqa", grid, asynchronous):
        assert_same_completions(completions, expected)
        assert min(sent) > 0


def expert_requests() -> list[EngineRequest]:
    """Return a request with two rows, and a longer one with a single row."""
    return [make_request([7, 8, 9, *[n] * 30], 5 + 20 * n, n=2 - n) for n in range(2)]


def counts_read_by_kernel(runs: RowRuns) -> tuple[int, ...]:
    """Return the rows of each run without the host read of the CPU's product.

    A GPU's grouped product reads them on the device.
    """
    ends = np.from_dlpack(runs.ends).tolist()
    return tuple(end - start for start, end in pairwise((0, *ends)))


def experts_on_rank(
    rank: int, world: int, max_padded_rows: int, asynchronous: bool, recorded: bool
) -> tuple[Any, ...]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=world), rank=rank)
    repeated_requests = expert_requests()
    with (
        one_thread(),
        mock.patch.object(dispatch, "MAX_PADDED_ROWS", max_padded_rows),
        mock.patch.object(model_runner, "MAX_PADDED_ROWS", max_padded_rows),
        mock.patch.object(RowRuns, "counts", property(counts_read_by_kernel)),
    ):
        outputs = []
        for batch in (
            repeated_requests,
            repeated_requests[:1],
        ):  # one replica finishes earlier; in the second round one is idle
            recorder = StrictRerun if recorded else None
            options = {"asynchronous": asynchronous, "make_recorder": recorder}
            replicas = replicas_on(groups, "experts", **options)
            ids = [replicas.add(request) for request in batch]
            completions, engine, in_flight = Completions(), replicas.engine, []
            while replicas.unfinished:
                completions.add(replicas.step())
                in_flight.append(len(engine._in_flight))
            outputs.append([completions[request_id, 0] for request_id in ids])
        engine.drain()
        replayed = engine.graphs.replayed if engine.graphs is not None else 0
        return outputs, engine.joined, engine.stats.steps, replayed, max(in_flight)


@pytest.mark.parametrize(
    ("max_padded_rows", "asynchronous", "recorded"),
    [
        pytest.param(0, False, False, id="exact"),
        pytest.param(dispatch.MAX_PADDED_ROWS, False, False, id="padded"),
        pytest.param(0, True, False, id="exact, asynchronous"),
        pytest.param(dispatch.MAX_PADDED_ROWS, True, True, id="graphs, asynchronous"),
        pytest.param(1, False, True, id="graphs of one row, exact ones of two"),
    ],
)
def test_idle_replica_computes_its_experts(
    max_padded_rows: int, asynchronous: bool, recorded: bool
) -> None:
    with one_thread():
        engine = replicas_on(ProcessGroupCollection.single(), "experts").engine
        expected = generate(engine, expert_requests())
    ranks = run_ranks(experts_on_rank, 2, max_padded_rows, asynchronous, recorded)
    for completions, *_ in ranks:
        assert_same_completions(
            {(n, 0): c for n, c in enumerate([*completions[0], *completions[1]])},
            {(n, 0): c[0] for n, c in enumerate([*expected, expected[0]])},
        )
    (_, joined, steps, replayed, in_flight), (_, joined_1, steps_1, replayed_1, _) = ranks
    assert (joined, steps_1) == (0, 0)
    assert joined_1 == steps > 0
    assert replayed == replayed_1
    if recorded and max_padded_rows == 1:  # a step of two rows reads on the host and uses no graph
        assert 0 < replayed < steps - 1
    else:
        assert replayed == (steps - 1 if recorded else 0)  # all steps but prefill
    assert in_flight == (1 if asynchronous else 0)  # between two calls of `step`


def differing_assignments_on_rank(rank: int, world: int) -> str:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    replicas = replicas_on(groups, "gqa")
    assert replicas.router is not None
    if rank:  # planted fault: this rank matches no prefix
        replicas.router._num_shared_blocks = lambda sent, hashes: 0
    return str(completions_of(replicas))


def test_ranks_with_different_assignments_fail() -> None:
    with pytest.raises(RankFailure, match="have assigned requests differently"):
        run_ranks(differing_assignments_on_rank, 2)
