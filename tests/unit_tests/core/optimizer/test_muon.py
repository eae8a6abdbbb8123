# SPDX-License-Identifier: Apache-2.0
"""Muon against whole matrices in fp64, on one rank and on flat shards over several."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.comm import CollectiveRecord, trace
from megatron.core.optimizer import MuonConfig, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_sharding import STRATEGIES
from tests.support.closeness import assert_all_close, assert_piece_close
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.optimizer.gradient_steps import SHAPES, Training, drawn

MATRICES = ("q", "k", "down", "experts")
STEPS, LR, DECAY = 3, 0.05, 0.1
ALL = 10**6
"""Bucket bytes that hold every weight: shards then end inside matrices and inside rows."""


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
            assert training.step(drawn(step), lr=LR, weight_decay=DECAY).applied
    return training


def orthogonal(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the published iteration's result in fp64."""
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
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        moves = {}
        for name, gradient in drawn(step).items():
            g = gradient.double() / divisor
            if name in MATRICES:
                first[name] = muon.momentum * first[name] + g
                moves[name] = g + muon.momentum * first[name] if muon.nesterov else first[name]
                continue
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            root = (second[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-5
            moves[name] = first[name] / (1 - 0.8 ** (step + 1)) / root
        joined = [("q",), ("k",)] if muon.split_matrices == "all" else [("q", "k")]
        fused = [("down",), ("experts",), *joined]
        for names in fused:
            whole = torch.cat([moves[name] for name in names])
            rows, cols = whole.shape
            scale = {
                "spectral": math.sqrt(max(rows, cols)),
                "rms": 0.2 * math.sqrt(max(rows, cols)),
                "shape_scaling": math.sqrt(max(1, rows / cols)),
            }[muon.scale_mode]
            whole = muon.extra_scale_factor * scale * orthogonal(whole, muon.num_ns_steps)
            for name, part in zip(names, whole.split([len(moves[n]) for n in names]), strict=True):
                moves[name] = part
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
    ids=["defaults", "nesterov", "scaled", "each", "rounds"],
)
def test_one_rank_equals_the_equations(muon: dict):
    config = settings(**muon)
    training = Training(ProcessGroupCollection.single(), config)
    start = training.logical()
    wanted = formula(start, config)
    with trace(training.groups) as records:
        train(training)
    assert records == []
    assert_all_close(training.logical(), wanted, bound=1e-5)
    other = formula(start, settings(momentum=0.95))
    for name in MATRICES:  # what each setting does is far above the bound
        assert (wanted[name] - other[name]).abs().max() > 1e-3 * wanted[name].abs().max(), name
    planned = training.optimizer.muon
    assert planned is not None
    assert planned.owned_matrices == (4 if config.muon.split_matrices == "all" else 3)
    assert len(planned.rounds) == (3 if config.muon.round_bytes == 1 else 1)


def test_loss_scale_and_clipping_do_not_turn_the_update():
    """Newton-Schulz forgets the scale of a gradient; momentum of steps clipped alike does too."""
    config = settings()
    training = Training(ProcessGroupCollection.single(), config, scale=4096.0)
    start = training.logical()
    train(training)
    assert_all_close(training.logical(), formula(start, config), bound=1e-5)


def test_gradients_in_bf16_are_widened():
    """What is rounded is the gradient alone."""
    config = settings(momentum=0.5)
    narrow = Training(ProcessGroupCollection.single(), config, grad_dtype=torch.bfloat16)
    wide = Training(ProcessGroupCollection.single(), config)
    for step in range(STEPS):
        narrow.step(drawn(step), lr=LR, weight_decay=DECAY)
        once = {name: g.bfloat16().float() for name, g in drawn(step).items()}
        wide.step(once, lr=LR, weight_decay=DECAY)
    assert {s.owned.gradients.dtype for s in narrow.optimizer.ranges} == {torch.bfloat16}
    assert_all_close(narrow.logical(), wide.logical(), bound=1e-6)


def test_matrices_have_momentum_and_the_rest_have_moments():
    training = Training(ProcessGroupCollection.single(), settings(), bucket_bytes=ALL)
    kept: dict[str, set[str]] = {}
    numel: dict[str, int] = {}
    for state in training.optimizer.ranges:
        for kind, flat in state.named_tensors().items():
            numel[kind] = numel.get(kind, 0) + flat.numel()
            for placed in state.owned.boxes:
                kept.setdefault(placed.name, set()).add(kind)
    assert kept == {
        name: {"momentum"} if name in MATRICES else {"exp_avg", "exp_avg_sq"} for name in SHAPES
    }
    matrices = sum(math.prod(SHAPES[name]) for name in MATRICES)
    everything = sum(math.prod(shape) for shape in SHAPES.values())
    # nothing but the alignment of members comes on top
    assert matrices <= numel["momentum"] <= matrices + 32 * 6
    assert everything - matrices <= numel["exp_avg"] <= everything - matrices + 32 * 6


def test_low_precision_weights_follow_their_masters():
    config = settings()
    training = Training(ProcessGroupCollection.single(), config, dtype=torch.bfloat16)
    wanted = formula(training.logical(), config)
    train(training)
    masters = {
        placed.name: placed.of(state.master)
        for state in training.optimizer.ranges
        for placed in state.owned.boxes
        if placed.name != "q" and placed.name != "k"
    }
    assert_all_close(masters, {name: wanted[name] for name in masters}, bound=1e-5)
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
    """Return every strategy; on grids with an outer axis those that use it."""
    if grid.instances > 1:
        whole = {"strategy": "optim_grads_params"}
        return [{"strategy": "optim"}, whole, {**whole, "outer": "optim"}]
    return [{"strategy": strategy} for strategy in STRATEGIES]


def on_ranks(rank: int, world: int) -> list[dict]:
    """Train on every grid and strategy, in turn with small buckets and collectives as late as they
    may be, and with one bucket, collectives as early as they may be and fused weights joined."""
    found = []
    for number, grid in enumerate(grids(world)):
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for turn, placed in enumerate(placements(grid)):
            joined = bool((number + turn) % 2)
            muon = {} if joined else {"split_matrices": "all", "round_bytes": 900}
            bucket_bytes, link = (ALL, Early()) if joined else (300, Late())
            training = Training(groups, settings(**muon), bucket_bytes=bucket_bytes, **placed)
            with simulated(groups, link), trace(groups) as records:
                train(training)
            assert link.count
            found.append({"joined": joined, **seen(training), "exchanges": exchanges(records)})
    return found


def exchanges(records: list[CollectiveRecord]) -> int:
    return sum(record.kind == "all_to_all" for record in records)


def seen(training: Training) -> dict:
    """Return what a rank holds and has planned."""
    planned = training.optimizer.muon
    assert planned is not None
    ways = [way for r in planned.rounds for way in (r.gather, r.give_back)]
    # q and k are cut by rows alone: other columns are the end of a shard inside a row
    cut = any(
        placed.name in ("q", "k") and placed.box.sizes[1] != SHAPES["q"][1]
        for state in training.optimizer.ranges
        for placed in state.owned.boxes
    )
    return {
        "cut": cut,
        "matrices": planned.owned_matrices,
        "rounds": len(planned.rounds),
        "local": sum(way.local for way in ways),
        "pieces": training.pieces(),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_muon_on_ranks_matches_one_rank_with_equal_replicas(world: int):
    wanted = {}
    for joined in (False, True):
        split = {} if joined else {"split_matrices": "all"}
        single = Training(ProcessGroupCollection.single(), settings(**split))
        wanted[joined] = train(single).logical()
    cut = 0
    for runs in zip(*run_ranks(on_ranks, world), strict=True):
        joined = runs[0]["joined"]
        assert sum(one["matrices"] for one in runs) == (3 if joined else 4)
        assert max(one["matrices"] for one in runs) < 3, "one rank does all the work"
        rounds, local = runs[0]["rounds"], runs[0]["local"]
        assert (rounds > 1) != joined
        assert {one["exchanges"] for one in runs} == {STEPS * (2 * rounds - local)}
        first_of: dict[tuple, torch.Tensor] = {}
        for name, offsets, values in (piece for one in runs for piece in one["pieces"]):
            same = first_of.setdefault((name, offsets, values.shape), values)
            assert torch.equal(values, same), name
            assert_piece_close(name, values, wanted[joined][name], offsets)
        cut += any(one["cut"] for one in runs)
    assert cut, "no shard ended inside a row"


def test_what_cannot_be_is_named_at_once():
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
    for part in (
        "muon momentum is 1.0: use 0 <= value < 1",
        "muon takes 0 Newton-Schulz steps: use at least 1",
        "muon scale mode 'linear': use one of spectral, shape_scaling, unit_rms_norm, rms",
        "muon split matrices 'rows': use one of megatron, all, whole",
        "muon extra scale factor is 0.0",
        "muon rounds of 0 bytes",
    ):
        assert part in text
    with pytest.raises(ValueError, match="'all' splits q, k and v: use split_qkv=True"):
        MuonConfig(split_matrices="all", split_qkv=False)
    with pytest.raises(ValueError, match="muon does not support offloading"):
        OptimizerConfig(kind="muon", offload_fraction=1.0)
