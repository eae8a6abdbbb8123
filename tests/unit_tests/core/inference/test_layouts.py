# SPDX-License-Identifier: Apache-2.0
"""The engine on grids of ranks, against one process: tokens, log-probabilities and every logit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from megatron.core.device import Recorder
from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.engine import (
    Completion,
    Engine,
    EngineConfig,
    EngineFeatures,
    Request,
    generate,
)
from megatron.core.inference.stages import PipelineGroups
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import (
    DRAWN,
    FAMILIES,
    GREEDY,
    VOCABULARY,
    requests,
)
from tests.unit_tests.core.inference.test_speculation import half_right

FACTORS = ("family", "forward", "blocks", "budget", "prefix_caching", "reports", "drafts")
#: What must change no token, a row of each family; several rows are wanted of most values.
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
    config, shares = FAMILIES[row["family"]], groups.grid.dp > 1 and groups.grid.ep > 1
    split = StageSplit.balanced(
        config.blocks, groups["pp"].size, blocks_of_layer=config.layer_blocks
    )
    dtype = torch.float32 if row["family"] == "experts" else torch.float64
    model = GPTModel(config, groups, dtype=dtype, seed=3, split=split, **layout)
    return Engine(
        InferenceOptimizedModel(model) if row["forward"] == "optimized" else model,
        EngineConfig(
            num_blocks=row["blocks"],
            max_rows=6,
            max_step_tokens=row["budget"],
            prefix_caching=row["prefix_caching"],
            token_multiple=groups["tp"].size if layout else 1,
            num_speculative_tokens=3 if drafts else 0,
            asynchronous=row.get("asynchronous", False),
        ),
        shapes=CacheShapes.of(model.modules(), model.store.dtype),
        vocab_size=VOCABULARY,
        features=EngineFeatures(
            pipeline=PipelineGroups.of(groups),
            proposer=half_right(drafts) if drafts else None,
            expert_peers=groups.host_group("etp_ep") if shares else None,
            make_recorder=make_recorder,
        ),
    )


def asked_of(row: dict[str, Any]) -> list[Request]:
    asked = [replace(request, max_new_tokens=9) for request in requests(GREEDY)[1:]]
    if row["reports"]:
        params = replace(DRAWN, logprobs=2)
        asked[1:3] = [replace(r, n=2, prompt_logprobs=True, sampling=params) for r in asked[1:3]]
    return asked


def said(row: dict[str, Any], engine: Engine) -> list[list[Completion]]:
    return generate(engine, asked_of(row))


def said_on_a_rank(
    rank: int,
    world: int,
    grid: dict[str, int],
    rows: list[tuple[dict[str, Any], dict[tuple[int, ...], list[int]]]],
    layout: dict[str, bool],
) -> list[Any]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **grid), rank=rank)
    found = []
    for row, drafts in rows:
        with one_thread():
            engine = engine_on(groups, row, drafts, **layout)
            found.append((said(row, engine), engine.stats, engine.link.idle_seconds))
    return found


def assert_as_one_process(grid: dict[str, int], rows: list[dict[str, Any]], **layout: bool) -> None:
    world = 1
    for size in grid.values():
        world *= size
    alone, drafts = [], []
    for row in rows:
        with one_thread():
            engine = engine_on(ProcessGroupCollection.single(), row)
            alone.append((said(row, engine), engine.stats))
        texts = zip(asked_of(row), alone[-1][0], strict=True)
        drafts.append({r.prompt: c[0].tokens for r, c in texts} if row["drafts"] else {})
    ranks = run_ranks(said_on_a_rank, world, grid, list(zip(rows, drafts, strict=True)), layout)
    for n, (row, (wanted, single)) in enumerate(zip(rows, alone, strict=True)):
        for found in ranks:
            completions, stats, idle = found[n]
            for got, expected in zip(chain(*completions), chain(*wanted), strict=True):
                assert got.tokens == expected.tokens, row
                assert got.finish_reason == expected.finish_reason
                assert got.epochs == expected.epochs
                for name in ("logprobs", "prompt_logprobs"):
                    a, b = getattr(got, name), getattr(expected, name)
                    assert a == b if b is None else a == pytest.approx(b, rel=1e-4, abs=1e-5)
                tops = [[[i for i, _ in one] for one in c.top_logprobs] for c in (got, expected)]
                assert tops[0] == tops[1]
            assert stats.hit > 0 or not row["prefix_caching"]
            assert idle > 0 or "pp" not in grid
            assert (0 < stats.accepted < stats.drafted) == row["drafts"]
            if grid.get("pp", 1) > 1 and not row["drafts"]:
                assert stats.steps > single.steps  # several under way, of fewer rows each


def test_two_pipeline_stages_say_what_one_process_does() -> None:
    assert_as_one_process({"pp": 2}, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_four_ranks_say_what_one_process_does(sequence_parallel: bool) -> None:
    layout = {"sequence_parallel": True} if sequence_parallel else {}
    assert_as_one_process({"tp": 2, "pp": 2}, ROWS, **layout)
