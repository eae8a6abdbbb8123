# SPDX-License-Identifier: Apache-2.0
"""The engine on grids of ranks against one process: tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.device import Recorder
from megatron.core.inference import (
    Completion,
    Completions,
    Engine,
    EngineRequest,
    generate,
)
from megatron.core.inference.speculation import DraftModel, MultiTokenHeads, Proposer
from megatron.core.models import InferenceOptimizedModel
from tests.support.inputs import one_thread
from tests.support.one_batch import assert_same_completion
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import (
    DRAWN,
    GREEDY,
    allowed,
    draft_model_of,
    engine_of,
    forced,
    model_of,
    requests,
)
from tests.unit_tests.core.inference.test_speculation import flawed_proposer

FACTORS = ("family", "forward", "blocks", "budget", "prefix_caching", "reports", "drafts")
#: Options that must not change any token, one row per family; most values occur in several rows.
ROWS = [
    dict(zip(FACTORS, row, strict=True))
    for row in (
        ("gqa", "optimized", 64, 20, True, True, False),
        ("window and sinks", "local", 6, 500, False, False, True),
        ("experts", "optimized", 6, 20, True, False, False),
        ("latent", "local", 6, 500, True, True, True),
        ("hybrid", "optimized", 6, 20, True, False, True),
    )
]


def engine_on(
    groups: ProcessGroupCollection,
    row: dict[str, Any],
    drafts: dict[tuple[int, ...], list[int]] | None = None,
    make_recorder: Callable[[], Recorder] | None = None,
    **layout: bool,
) -> Engine:
    engine = engine_of(
        model_of(row["family"], groups, **layout),
        flawed_proposer(drafts) if drafts else None,
        make_recorder,
        num_blocks=row["blocks"],
        max_num_batched_tokens=row["budget"],
        prefix_caching=row["prefix_caching"],
        token_multiple=groups["tp"].size if layout else 1,
        asynchronous=row.get("asynchronous", False),
    )
    if row["forward"] == "optimized":
        engine.runner.model = InferenceOptimizedModel(engine.runner.model)
    return engine


def requests_of(row: dict[str, Any]) -> list[EngineRequest]:
    batch = [replace(request, max_new_tokens=9) for request in requests(GREEDY)[1:]]
    if row["reports"]:
        params = replace(DRAWN, logprobs=2)
        batch[1:3] = [replace(r, n=2, prompt_logprobs=True, sampling=params) for r in batch[1:3]]
    return batch


def completions_of(row: dict[str, Any], engine: Engine) -> list[list[Completion]]:
    return generate(engine, requests_of(row))


# --- drafts of a model in a pipeline --------------------------------------------------------------

#: Logit biases, so that drafts of untrained heads are sometimes accepted.
BIAS = {3: 7.0, 8: 7.0, 11: 7.0}


def drafting_engine(groups: ProcessGroupCollection, family: str, drafts: str) -> Engine:
    """Return an engine with few blocks and drafts of the given kind; "off" has none."""
    model = model_of(family, groups, depths=2 if drafts == "heads" else 0)
    proposer: Proposer | None = None
    if drafts == "heads":
        proposer = MultiTokenHeads(model, num_layers=2)
    elif drafts == "draft":
        holds_draft_model = groups["pp"].rank == 0
        proposer = DraftModel(
            engine_of(draft_model_of(family)) if holds_draft_model else None, list
        )
    count = 0 if drafts == "off" else 2
    return engine_of(
        model, proposer, num_blocks=8, max_num_batched_tokens=30, num_speculative_tokens=count
    )


def completions_with_an_abort(engine: Engine) -> Completions:
    """Return the completions of requests of all kinds, by request and output index.

    The first request is aborted after some steps, in the middle of its text.
    """
    greedy, drawn = replace(GREEDY, logit_bias=BIAS), replace(DRAWN, logit_bias=BIAS)
    kinds = [
        {"sampling": replace(greedy, logprobs=2), "max_new_tokens": 40},
        {"sampling": greedy, "stop_tokens": {8}},
        {"sampling": drawn, "n": 2},
        {"sampling": replace(drawn, presence_penalty=0.5)},
        {"sampling": greedy, "mask": allowed, "forced": forced},
        {"sampling": greedy, "stop_tokens": {31}, "prompt_logprobs": True},
    ]
    batch = [replace(r, **fields) for r, fields in zip(requests(), kinds, strict=True)]
    ids = [engine.add(request) for request in batch]
    completions = Completions()
    steps = 0
    while engine.unfinished:
        steps += 1
        if steps == 8:
            completions.add(engine.abort(ids[0]))
        completions.add(engine.step())
    return completions


def draft_on_rank(rank: int, world: int, cases: list[tuple[str, str]]) -> list[Any]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=world), rank=rank)
    runs = []
    for family, drafts in cases:
        with one_thread():
            engine = drafting_engine(groups, family, drafts)
            runs.append((completions_with_an_abort(engine), engine.stats, engine.link.idle_seconds))
            assert engine.scheduler.kv_cache.pool.references == engine.unfinished == 0
    return runs


def assert_drafts_change_no_token(world: int, cases: list[tuple[str, str]]) -> None:
    references = {}
    for family in dict.fromkeys(family for family, _ in cases):
        with one_thread():
            engine = drafting_engine(ProcessGroupCollection.single(), family, "off")
            references[family] = completions_with_an_abort(engine)
    for runs in run_ranks(draft_on_rank, world, cases):
        for (family, drafts), (completions, stats, idle) in zip(cases, runs, strict=True):
            reference = references[family]
            assert completions.keys() == reference.keys()
            for n, got in completions.items():
                expected = reference[n]
                assert got.finish_reason == expected.finish_reason, (family, drafts, n)
                lengths = {len(got.tokens), len(expected.tokens)}
                common = min(lengths)
                assert common > 0
                assert len(lengths) == 1 or got.finish_reason == "abort"
                assert got.tokens[:common] == expected.tokens[:common], (family, drafts, n)
                close = pytest.approx(expected.logprobs[:common], rel=1e-4, abs=1e-5)
                assert got.logprobs[:common] == close
                tops = [[i for i, _ in top] for top in got.top_logprobs[:common]]
                assert tops == [[i for i, _ in top] for top in expected.top_logprobs[:common]]
                if expected.prompt_logprobs is not None:
                    close = pytest.approx(expected.prompt_logprobs, rel=1e-4, abs=1e-5)
                    assert got.prompt_logprobs == close
            assert {c.finish_reason for c in completions.values()} == {"abort", "stop", "length"}
            assert 0 < stats.accepted < stats.drafted, (family, drafts)
            assert min(stats.preempted, stats.hit, stats.forced, idle) > 0, (family, drafts)


def test_model_drafts_in_a_pipeline_change_no_token() -> None:
    cases = [("gqa", "heads"), ("hybrid", "heads"), ("gqa", "draft")]
    assert_drafts_change_no_token(2, cases)


@pytest.mark.slow
def test_model_drafts_pass_through_a_middle_stage() -> None:
    assert_drafts_change_no_token(3, [("hybrid", "heads"), ("hybrid", "draft")])


def completions_on_rank(
    rank: int,
    world: int,
    grid: dict[str, int],
    rows: list[tuple[dict[str, Any], dict[tuple[int, ...], list[int]]]],
    layout: dict[str, bool],
) -> list[Any]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **grid), rank=rank)
    runs = []
    for row, drafts in rows:
        with one_thread():
            engine = engine_on(groups, row, drafts, **layout)
            runs.append((completions_of(row, engine), engine.stats, engine.link.idle_seconds))
    return runs


def assert_matches_one_process(
    grid: dict[str, int], rows: list[dict[str, Any]], **layout: bool
) -> None:
    world = 1
    for size in grid.values():
        world *= size
    references, drafts = [], []
    for row in rows:
        with one_thread():
            engine = engine_on(ProcessGroupCollection.single(), row)
            references.append((completions_of(row, engine), engine.stats))
        texts = zip(requests_of(row), references[-1][0], strict=True)
        drafts.append({r.prompt: c[0].tokens for r, c in texts} if row["drafts"] else {})
    ranks = run_ranks(
        completions_on_rank, world, grid, list(zip(rows, drafts, strict=True)), layout
    )
    for n, (row, (reference, single)) in enumerate(zip(rows, references, strict=True)):
        for rank_runs in ranks:
            completions, stats, idle = rank_runs[n]
            for got, expected in zip(chain(*completions), chain(*reference), strict=True):
                assert_same_completion(got, expected)
            assert stats.hit > 0 or not row["prefix_caching"]
            assert idle > 0 or "pp" not in grid
            assert (0 < stats.accepted < stats.drafted) == row["drafts"]
            if grid.get("pp", 1) > 1 and not row["drafts"]:
                assert (
                    stats.steps > single.steps
                )  # several microbatches in flight, with fewer rows each


def test_two_pipeline_stages_match_one_process() -> None:
    assert_matches_one_process({"pp": 2}, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_four_ranks_match_one_process(sequence_parallel: bool) -> None:
    layout = {"sequence_parallel": True} if sequence_parallel else {}
    assert_matches_one_process({"tp": 2, "pp": 2}, ROWS, **layout)
