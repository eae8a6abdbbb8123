# SPDX-License-Identifier: Apache-2.0
"""The coverage recorder records layouts and settings of applied steps only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.parity.pieces import assembled
from tests.parity.rows import row_with, world_of
from tests.parity.training import rank_of_row, single_run
from tests.support import coverage_recorder
from tests.support.covering_array import Row
from tests.support.ranks import run_ranks
from tests.support.status_rows import Ran, all_settings

ROW = row_with(
    tp=1, dp=2, pp=2, schedule="zb-h1", placement="optim_grads_params", granularity="weight",
    overlap=False, accumulation=3, per_token=True, tied=True, norm="LayerNorm", bias="all",
    gated=False, dropout=0.1, experts="sigmoid", ep=2, shared="gated", attention="latent", groups=8,
    capacity="position", predictions=1, recompute="selective", dispatcher="allgather",
    loss_scale=1024.0,
)  # fmt: skip
#: The same layout and settings, named as docs/status.md names them.
EXPECTED = Ran(
    world=4, tp=1, cp=1, pp=2, dp=2, ep=2, etp=1, sequence_parallel=False, schedule="zb-h1",
    strategy="optim_grads_params",
    settings=tuple(sorted((
        "fp32", "loss scale", "per-token loss", "gradient accumulation", "SGD",
        "grad reduce at the end", "param gather per weight", "selective recompute", "dropout",
        "LayerNorm",
        "tied embedding", "plain MLP", "biases", "multi-token prediction", "latent attention",
        "sigmoid router", "router losses", "expert bias balancing", "drop policy position",
        "gated shared expert", "all-gather dispatcher",
    ))),
)  # fmt: skip


def _train_twice(rank: int, world: int, row: Row, initial: dict) -> None:
    """Train a row with a finite loss, then another placement of it with weights of NaN."""
    rank_of_row(rank, world, row, initial)
    broken = {name: torch.full_like(w, float("nan")) for name, w in initial.items()}
    rank_of_row(rank, world, {**row, "placement": "optim", "granularity": "unit"}, broken)


def test_coverage_recorder_counts_applied_but_not_skipped_steps(tmp_path: Path) -> None:
    assert set(EXPECTED.settings) < set(all_settings())
    initial = assembled(single_run(ROW, None).initial)
    path = tmp_path / "ran.jsonl"
    env = {coverage_recorder.VARIABLE: str(path)}
    run_ranks(_train_twice, world_of(ROW), ROW, initial, env=env)
    assert coverage_recorder.read(path) == [EXPECTED]


def test_steps_are_not_wrapped_without_the_variable(tmp_path: Path) -> None:
    if coverage_recorder.VARIABLE in os.environ:
        pytest.skip("with --status-out every test is recorded")
    assert run_ranks(_step_is_wrapped, 2) == [False, False]
    env = {coverage_recorder.VARIABLE: str(tmp_path / "none")}
    assert run_ranks(_step_is_wrapped, 2, env=env) == [True, True]
    assert coverage_recorder.read(tmp_path / "none") == []


def _step_is_wrapped(rank: int, world: int) -> bool:
    from megatron.training.step import TrainStep

    return "__wrapped__" in vars(TrainStep.__call__)


def test_strategy_with_one_dp_rank_is_not_recorded(tmp_path: Path) -> None:
    """A strategy that runs on one dp rank proves nothing about several ranks."""
    row = row_with(tp=2, dp=1, placement="optim_grads", early_gather=True)
    initial = assembled(single_run(row, None).initial)
    env = {coverage_recorder.VARIABLE: str(tmp_path / "ran.jsonl")}
    run_ranks(rank_of_row, 2, row, initial, env=env)
    (ran,) = coverage_recorder.read(tmp_path / "ran.jsonl")
    assert (ran.tp, ran.strategy) == (2, "")
    assert not {"overlapped grad reduce", "overlapped param gather"} & set(ran.settings)
