# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the benchmarks: ratios by round, verdicts, and workers that take turns."""

import importlib

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.models import GPTModel
from tools.bench import ops
from tools.bench.__main__ import BENCHES
from tools.bench.data_parallel_steps import batch_of
from tools.bench.gloo_ranks import CPU, LOSS, STEP, check_losses, over_ranks
from tools.bench.gloo_ranks import ratio as step_ratio
from tools.bench.mcore_step import config_of
from tools.bench.plain_model import PlainModel, copy_weights
from tools.bench.shapes import Shape
from tools.bench.turns import Variant, ratio, take_turns

WORKER = """
import sys, time
from tools.bench.turns import serve
def build():
    print("a library's chatter")
    return lambda: time.sleep({seconds}) or {value}
serve(build)
"""


def test_ratio_compares_within_rounds():
    # The machine halves its speed between the rounds; each round still has the ratio 2.
    megatron = Variant("ours", rounds=[[1.0, 1.0], [2.0, 2.0], [2.0, 9.0, 2.0]])
    peer = Variant("peer", rounds=[[2.0, 2.0], [4.0, 4.0], [4.0, 4.0, 4.0]])
    assert ratio(megatron, peer) == 2.0


def test_workers_take_turns_and_broken_workers_are_dropped(capfd):
    commands = {
        "fast": ["-c", WORKER.format(seconds=0.01, value=3.5)],
        "broken": ["-c", "raise SystemExit(7)"],
        "slow": ["-c", WORKER.format(seconds=0.05, value=1.5)],
    }
    variants = take_turns(commands, rounds=3, steps=2, warmup=1)
    assert list(variants) == ["fast", "slow"]
    assert [len(steps) for steps in variants["fast"].rounds] == [2, 2, 2]
    assert variants["slow"].values == [1.5] * 6
    assert min(s for steps in variants["slow"].rounds for s in steps) >= 0.05
    assert variants["fast"].peak_memory_bytes > 1 << 20
    assert "broken ended with exit code 7; left out" in capfd.readouterr().err


@pytest.mark.parametrize("name", [b for b in BENCHES if b != "ops"])  # ops needs transformers
def test_every_bench_returns_rows(name):
    assert callable(importlib.import_module(f"tools.bench.{name}").rows)


def test_step_time_is_the_slowest_rank():
    ranks = [{"ours": [{STEP: s, CPU: s / 2} for s in rank]} for rank in ((1.0, 4.0), (3.0, 2.0))]
    assert over_ranks(ranks, "ours", STEP) == [3.0, 4.0]
    assert over_ranks(ranks, "ours", CPU) == [2.0, 3.0]
    assert step_ratio([1.0, 4.0, 9.0], [2.0, 4.0, 3.0]) == 1.0


def test_race_with_different_losses_is_void():
    ranks = [{"ours": [{LOSS: 1.0}], "ddp": [{LOSS: 1.5}]} for _ in range(2)]
    ranks[1]["ours"] = [{LOSS: 2.0}]
    check_losses(ranks, ("ours", "ddp"))
    ranks[0]["ddp"] = [{LOSS: 1.5001}]
    with pytest.raises(ValueError, match="step 0: the losses differ"):
        check_losses(ranks, ("ours", "ddp"))


def test_plain_module_matches_loss_and_trains_every_weight():
    shape = Shape(
        layers=2, hidden=24, ffn=40, heads=3, kv_heads=1, vocabulary=53, batch=2, sequence=9
    )
    megatron = GPTModel(config_of(shape), ProcessGroupCollection.single(), seed=5)
    plain = PlainModel(shape)
    copy_weights(plain, megatron, shape)
    tokens, labels = batch_of(shape, 0, 1)
    weights = torch.rand(tokens.shape)
    loss = plain(tokens, labels, weights)
    assert loss.item() == pytest.approx(megatron.loss(tokens, labels, weights)[0].item(), rel=1e-6)
    loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in plain.parameters())
    wider_shape = Shape(
        layers=2, hidden=24, ffn=48, heads=3, kv_heads=1, vocabulary=53, batch=2, sequence=9
    )
    with pytest.raises(ValueError, match="the models differ"):
        copy_weights(PlainModel(wider_shape), megatron, wider_shape)


def failing_case(bench):
    raise ValueError("no such op")


def test_failing_op_fails_the_table_of_all_benchmarks(monkeypatch):
    monkeypatch.setattr(ops, "selected", lambda bench, only: [("bad", failing_case)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a CPU bench all the same
    with pytest.raises(RuntimeError, match="no such op"):
        ops.rows(quick=True)
