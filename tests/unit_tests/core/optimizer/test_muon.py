# SPDX-License-Identifier: Apache-2.0
"""Muon against full matrices in fp64, on one rank and on flat shards over several ranks."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import CollectiveRecord, trace
from megatron.core.optimizer import MuonConfig, OptimizerConfig
from megatron.core.weight_sharding import STRATEGIES
from tests.support.closeness import assert_all_close, assert_piece_close
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.optimizer.gradient_steps import SHAPES, Training, random_gradients

MATRICES = ("q", "k", "down", "experts")
STEPS, LR, DECAY = 3, 0.05, 0.1
#: Bucket bytes that hold every weight: shards then end inside matrices and inside rows.
SINGLE_BUCKET = 10**6


def settings(**muon: object) -> OptimizerConfig:
    return OptimizerConfig(
        kind="muon",
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_eps=1e-5,
        lr_factors=(("down*", 2.0),),
        decay_factors=(("k", 3.0),),
        clip_grad=0.0,
        muon=MuonConfig(adam_names=("table",), **muon),  # type: ignore[arg-type]
    )


def train(training: Training) -> Training:
    with nan_memory():
        for step in range(STEPS):
            assert training.step(random_gradients(step), lr=LR, weight_decay=DECAY).applied
    return training


def orthogonal(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Apply the published iteration in fp64."""
    tall = x.shape[0] > x.shape[1]
    u = (x.T if tall else x) / x.norm()
    for _ in range(steps):
        gram = u @ u.T
        u = 3.4445 * u + (-4.7750 * gram + 2.0315 * gram @ gram) @ u
    return u.T if tall else u


def formula(
    start: dict[str, torch.Tensor], config: OptimizerConfig, *, divisor: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return weights after the steps by the papers' equations, in fp64."""
    muon = config.muon
    weights = {name: w.double() for name, w in start.items()}
    momentum = {name: torch.zeros_like(w) for name, w in weights.items()}
    second_moment = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        moves = {}
        for name, gradient in random_gradients(step).items():
            g = gradient.double() / divisor
            if name in MATRICES:
                momentum[name] = muon.momentum * momentum[name] + g
                moves[name] = (
                    g + muon.momentum * momentum[name] if muon.nesterov else momentum[name]
                )
                continue
            momentum[name] = 0.8 * momentum[name] + 0.2 * g
            second_moment[name] = 0.95 * second_moment[name] + 0.05 * g * g
            root = (second_moment[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-5
            moves[name] = momentum[name] / (1 - 0.8 ** (step + 1)) / root
        joined = [("q",), ("k",)] if muon.split_matrices == "all" else [("q", "k")]
        matrices = [("down",), ("experts",), *joined]
        for names in matrices:
            matrix = torch.cat([moves[name] for name in names])
            rows, cols = matrix.shape
            scale = {
                "spectral": math.sqrt(max(rows, cols)),
                "rms": 0.2 * math.sqrt(max(rows, cols)),
                "shape_scaling": math.sqrt(max(1, rows / cols)),
            }[muon.scale_mode]
            matrix = muon.extra_scale_factor * scale * orthogonal(matrix, muon.num_ns_steps)
            for name, tensor_move in zip(
                names, matrix.split([len(moves[n]) for n in names]), strict=True
            ):
                moves[name] = tensor_move
        for name, move in moves.items():
            lr = LR * (2.0 if name.startswith("down") else 1.0)
            decay = DECAY * {"norm": 0.0, "down.bias": 0.0, "k": 3.0}.get(name, 1.0)
            weights[name] = weights[name] * (1 - lr * decay) - lr * move
    return weights


@pytest.mark.parametrize(
    "muon",
    [
        {},
        {"momentum": 0.5, "nesterov": True, "scale_mode": "rms"},
        {"num_ns_steps": 3, "scale_mode": "shape_scaling", "extra_scale_factor": 0.5},
        {"split_matrices": "all"},
        {"round_bytes": 1},
    ],
    ids=["defaults", "nesterov", "scaled", "split", "rounds"],
)
def test_muon_on_one_rank_matches_the_equations(muon: dict):
    config = settings(**muon)
    training = Training(ProcessGroupCollection.single(), config)
    start = training.logical()
    expected = formula(start, config)
    with trace(training.groups) as records:
        train(training)
    assert records == []
    assert_all_close(training.logical(), expected, bound=1e-5)
    changed_momentum = formula(start, settings(momentum=0.95))
    for name in MATRICES:  # every setting changes the weights far beyond the bound
        difference = (expected[name] - changed_momentum[name]).abs().max()
        assert difference > 1e-3 * expected[name].abs().max(), name
    plan = training.optimizer.muon
    assert plan is not None
    assert plan.owned_matrices == (4 if config.muon.split_matrices == "all" else 3)
    assert len(plan.rounds) == (3 if config.muon.round_bytes == 1 else 1)


def test_loss_scale_and_clipping_do_not_change_the_update():
    """Newton-Schulz does not depend on a gradient's scale, nor on equal clipping in every step."""
    config = settings()
    training = Training(ProcessGroupCollection.single(), config, scale=4096.0)
    start = training.logical()
    train(training)
    assert_all_close(training.logical(), formula(start, config), bound=1e-5)


def test_bf16_gradients_are_upcast_to_fp32():
    """Only the gradient is rounded."""
    config = settings(momentum=0.5)
    bf16_training = Training(ProcessGroupCollection.single(), config, grad_dtype=torch.bfloat16)
    fp32_training = Training(ProcessGroupCollection.single(), config)
    for step in range(STEPS):
        bf16_training.step(random_gradients(step), lr=LR, weight_decay=DECAY)
        rounded = {name: g.bfloat16().float() for name, g in random_gradients(step).items()}
        fp32_training.step(rounded, lr=LR, weight_decay=DECAY)
    assert {s.owned.gradients.dtype for s in bf16_training.optimizer.ranges} == {torch.bfloat16}
    assert_all_close(bf16_training.logical(), fp32_training.logical(), bound=1e-6)


def test_matrices_have_momentum_and_others_adam_moments():
    training = Training(ProcessGroupCollection.single(), settings(), bucket_bytes=SINGLE_BUCKET)
    kinds: dict[str, set[str]] = {}
    numel: dict[str, int] = {}
    for state in training.optimizer.ranges:
        for kind, flat in state.named_tensors().items():
            numel[kind] = numel.get(kind, 0) + flat.numel()
            for box in state.owned.boxes:
                kinds.setdefault(box.name, set()).add(kind)
    assert kinds == {
        name: {"momentum"} if name in MATRICES else {"exp_avg", "exp_avg_sq"} for name in SHAPES
    }
    matrices = sum(math.prod(SHAPES[name]) for name in MATRICES)
    total = sum(math.prod(shape) for shape in SHAPES.values())
    # the buffers exceed the weights only by the members' alignment
    assert matrices <= numel["momentum"] <= matrices + 32 * 6
    assert total - matrices <= numel["exp_avg"] <= total - matrices + 32 * 6


def test_low_precision_weights_follow_their_masters():
    config = settings()
    training = Training(ProcessGroupCollection.single(), config, dtype=torch.bfloat16)
    expected = formula(training.logical(), config)
    train(training)
    masters = {
        box.name: box.of(state.master)
        for state in training.optimizer.ranges
        for box in state.owned.boxes
        if box.name != "q" and box.name != "k"
    }
    assert_all_close(masters, {name: expected[name] for name in masters}, bound=1e-5)
    for name, weight in training.logical().items():
        if name in masters:
            assert torch.equal(weight, masters[name].bfloat16()), name


def test_a_model_without_matrices_is_refused():
    with pytest.raises(ValueError, match="optimizer muon has no matrix to update: use adam"):
        Training(
            ProcessGroupCollection.single(),
            OptimizerConfig(kind="muon", muon=MuonConfig(adam_names=("[!n]*",))),
        )
    with pytest.raises(ValueError, match="AdamW updates: no weight matches router"):
        Training(
            ProcessGroupCollection.single(),
            OptimizerConfig(kind="muon", muon=MuonConfig(adam_names=("router",))),
        )


def grids(world: int) -> list[RankGrid]:
    if world == 2:
        return [RankGrid(world_size=2), RankGrid(world_size=2, tp=2)]
    return [
        RankGrid(world_size=4),
        RankGrid(world_size=4, tp=2, etp=1, ep=4),
        RankGrid(world_size=4, tp=2, cp=2),
        RankGrid(world_size=4, instances=2),
        RankGrid(world_size=4, tp=2, instances=2),
    ]


def placements(grid: RankGrid) -> list[dict[str, str]]:
    """Return every strategy; on grids with instances, the strategies that shard over them."""
    if grid.instances > 1:
        zero3 = {"strategy": "optim_grads_params"}
        return [{"strategy": "optim"}, zero3, {**zero3, "outer": "optim"}]
    return [{"strategy": strategy} for strategy in STRATEGIES]


def train_on_ranks(rank: int, world: int) -> list[dict]:
    """Train on every grid and strategy, alternating between small buckets with late collectives,
    and one bucket with early collectives and joined matrices."""
    runs = []
    for grid_index, grid in enumerate(grids(world)):
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for placement_index, data_parallel in enumerate(placements(grid)):
            joined = bool((grid_index + placement_index) % 2)
            muon = {} if joined else {"split_matrices": "all", "round_bytes": 900}
            bucket_bytes, link = (SINGLE_BUCKET, Early()) if joined else (300, Late())
            training = Training(
                groups, settings(**muon), bucket_bytes=bucket_bytes, **data_parallel
            )
            with simulated(groups, link), trace(groups) as records:
                train(training)
            assert link.count
            runs.append(
                {"joined": joined, **describe_rank(training), "exchanges": count_exchanges(records)}
            )
    return runs


def count_exchanges(records: list[CollectiveRecord]) -> int:
    return sum(record.kind == "all_to_all" for record in records)


def describe_rank(training: Training) -> dict:
    """Return a rank's shards and the size of its plan."""
    plan = training.optimizer.muon
    assert plan is not None
    exchanges = [exchange for r in plan.rounds for exchange in (r.gather, r.give_back)]
    # tp shards q and k by rows only: a box with fewer columns means a shard ends inside a row
    splits_rows = any(
        box.name in ("q", "k") and box.box.sizes[1] != SHAPES["q"][1]
        for state in training.optimizer.ranges
        for box in state.owned.boxes
    )
    return {
        "splits_rows": splits_rows,
        "matrices": plan.owned_matrices,
        "rounds": len(plan.rounds),
        "local": sum(exchange.local for exchange in exchanges),
        "shards": training.shards(),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_muon_on_ranks_matches_one_rank_with_equal_replicas(world: int):
    expected = {}
    for joined in (False, True):
        split = {} if joined else {"split_matrices": "all"}
        single = Training(ProcessGroupCollection.single(), settings(**split))
        expected[joined] = train(single).logical()
    num_split_rows = 0
    for runs in zip(*run_ranks(train_on_ranks, world), strict=True):
        joined = runs[0]["joined"]
        assert sum(rank_run["matrices"] for rank_run in runs) == (3 if joined else 4)
        assert max(rank_run["matrices"] for rank_run in runs) < 3, "no rank does all the work"
        rounds, local = runs[0]["rounds"], runs[0]["local"]
        assert (rounds > 1) != joined
        assert {rank_run["exchanges"] for rank_run in runs} == {STEPS * (2 * rounds - local)}
        replicas: dict[tuple, torch.Tensor] = {}
        for name, offsets, values in (shard for rank_run in runs for shard in rank_run["shards"]):
            first_replica = replicas.setdefault((name, offsets, values.shape), values)
            assert torch.equal(values, first_replica), name
            assert_piece_close(name, values, expected[joined][name], offsets)
        num_split_rows += any(rank_run["splits_rows"] for rank_run in runs)
    assert num_split_rows, "a shard ends inside a row"


def test_all_invalid_muon_settings_are_reported_at_once():
    with pytest.raises(ValueError) as caught:
        MuonConfig(
            momentum=1.0,
            num_ns_steps=0,
            scale_mode="linear",
            extra_scale_factor=0.0,
            split_matrices="rows",
            round_bytes=0,
        )
    text = str(caught.value)
    for problem in (
        "muon momentum is 1.0: use 0 <= value < 1",
        "muon takes 0 Newton-Schulz steps: use at least 1",
        "muon scale mode 'linear': use one of spectral, shape_scaling, unit_rms_norm, rms",
        "muon split matrices 'rows': use one of megatron, all, whole",
        "muon extra scale factor is 0.0",
        "muon rounds of 0 bytes",
    ):
        assert problem in text
    with pytest.raises(ValueError, match=r"'all'.*split_qkv=True"):
        MuonConfig(split_matrices="all", split_qkv=False)
    with pytest.raises(ValueError, match="muon does not support offloading"):
        OptimizerConfig(kind="muon", offload_fraction=1.0)
