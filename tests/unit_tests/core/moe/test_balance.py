# SPDX-License-Identifier: Apache-2.0
"""Biases that follow expert loads, and load reports, on one rank and across pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe import Balance, MoEConfig, RouterConfig, RouterLoad, routers_of
from megatron.core.moe.router import MEASURES, Router
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.moe.single_layer import Layer, make_layer_build

EXPERTS, RATE, H = 7, 0.03, 6
CONFIG = MoEConfig(
    num_experts=EXPERTS,
    ffn_hidden_size=4,
    router=RouterConfig(topk=2, score_function="sigmoid", expert_bias=True, bias_update_rate=RATE),
)
UNBIASED = MoEConfig(num_experts=EXPERTS, ffn_hidden_size=4, router=RouterConfig(topk=2))
NAMES = ("a.router", "b.router", "c.router")
#: For each step, whether it updated the weights.
STEPS = (True, False, True, True)


def build_routers(groups: ProcessGroupCollection, names: tuple[str, ...], config: MoEConfig):
    """Return routers with the given names, and a `Balance` for them."""
    build = make_layer_build(groups, hidden_size=H)
    routers = [Router(name, config=config, build=build) for name in names]
    build.store.materialize()
    return routers, Balance(routers, NAMES, config=config, world=groups["world"])


def loads(name: str, rank: int, step: int) -> torch.Tensor:
    """Return the counters of a router on one rank in one step, [E + measures]."""
    source = generator(step, rank, *name.encode())
    tokens = torch.randint(0, 9, (EXPERTS,), generator=source).double()
    if step == 0:  # an even load
        tokens = torch.full_like(tokens, 4.0)
    measures = torch.rand(len(MEASURES), generator=source).double() + 0.5
    measures[MEASURES.index("assigned")] = tokens.sum()
    return torch.cat([tokens, measures])


def expected_biases(sums: dict[int, torch.Tensor]) -> list[float]:
    """Return a router's biases after all steps, from the loads summed over ranks."""
    bias = torch.zeros(EXPERTS)
    for applied, step in zip(STEPS, sums, strict=True):
        tokens = sums[step][:EXPERTS].tolist()
        mean = sum(tokens) / EXPERTS
        for e in range(EXPERTS):
            if applied and tokens[e] != mean:
                bias[e] += RATE if tokens[e] < mean else -RATE
    return bias.tolist()


def run_balance(
    rank: int, world: int, degrees: dict[str, int], stage_names: dict[int, tuple[str, ...]]
) -> tuple[dict[str, list[float]], list[RouterLoad], list[RouterLoad]]:
    """Run all steps with synthetic loads; return the biases and two reports."""
    single = world == 1
    grid = RankGrid(world_size=world, **degrees)
    groups = (
        ProcessGroupCollection.single()
        if single
        else ProcessGroupCollection.create(grid, rank=rank)
    )
    routers, balance = build_routers(groups, stage_names[groups["pp"].rank], CONFIG)
    for step, applied in enumerate(STEPS):
        for router in routers:
            assert not router.counted.any()
            router.counted.copy_(loads(router.name, rank, step))
        before = [router.expert_bias.clone() for router in routers]
        with trace(groups) as records:
            balance.finish(applied=applied)
        assert len(records) == (0 if single or not applied else 1)
        for router, bias in zip(routers, before, strict=True):
            assert torch.equal(router.expert_bias, bias) == (not applied or step == 0)
    with trace(groups) as records:
        report = balance.report()
    assert len(records) == (0 if single else 1)
    assert all(router.expert_bias.dtype == torch.float32 for router in routers)
    biases = {router.name: router.expert_bias.tolist() for router in routers}
    return biases, report, balance.report()


@pytest.mark.parametrize(
    ("world", "degrees", "stage_names"),
    [
        (1, {}, {0: NAMES}),
        (4, {"ep": 2, "pp": 2}, {0: NAMES, 1: ()}),
        (4, {"ep": 2, "pp": 2}, {0: NAMES[:1], 1: NAMES[1:]}),
        (4, {"tp": 2, "etp": 1, "ep": 2}, {0: NAMES}),
    ],
)
def test_biases_follow_the_formula_on_all_ranks(
    world: int, degrees: dict[str, Any], stage_names: dict[int, tuple[str, ...]]
):
    if world == 1:
        outputs = [run_balance(0, 1, degrees, stage_names)]
    else:
        outputs = run_ranks(run_balance, world, degrees, stage_names)
    ranks_per_stage = world // len(stage_names)  # ranks of a stage
    sums: dict[str, dict[int, torch.Tensor]] = {}
    for stage, names in stage_names.items():
        ranks = range(stage * ranks_per_stage, (stage + 1) * ranks_per_stage)
        for name in names:
            sums[name] = {
                step: sum(loads(name, rank, step) for rank in ranks) for step in range(len(STEPS))
            }
    for rank, (biases, report, next_report) in enumerate(outputs):
        names = stage_names[rank // ranks_per_stage]
        assert tuple(biases) == names
        for name in names:
            assert biases[name] == expected_biases(sums[name]), name
            assert len(set(biases[name])) > 1
        assert tuple(load.name for load in report) == NAMES
        for load in report:
            total = sum(sums[load.name].values())
            measures = dict(zip(MEASURES, total[EXPERTS:].tolist(), strict=True))
            assert load.tokens == tuple(int(n) for n in total[:EXPERTS])
            assert load.dropped == pytest.approx(measures["dropped"] / measures["assigned"])
            assert load.entropy == pytest.approx(2 * measures["entropy"] / measures["assigned"])
            for loss in ("balance_loss", "z_loss"):
                mean = measures[loss] / measures["microbatches"]
                assert getattr(load, loss) == pytest.approx(mean)
            mean = sum(load.tokens) / EXPERTS
            assert load.imbalance == pytest.approx(max(load.tokens) / mean)
        for load in next_report:
            assert load == RouterLoad(load.name, (0,) * EXPERTS, 0.0, 0.0, 0.0, 0.0)
            assert load.imbalance == 0.0


def run_without_biases(rank: int, world: int) -> None:
    """Check that a step without biases communicates nothing."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    (router,), balance = build_routers(groups, NAMES[1:2], UNBIASED)
    router.counted.fill_(3.0)
    with trace(groups) as records:
        balance.finish(applied=True)
    assert records == []
    assert not router.counted.any()
    assert [load.tokens[0] for load in balance.report()] == [0, 3 * world, 0]


def test_without_biases_only_reports_communicate():
    run_ranks(run_without_biases, 2)


def test_biases_even_out_expert_loads():
    layer = Layer(CONFIG, hidden_size=H)
    (router,) = routers_of(layer.moe)
    hidden = torch.randn(29, 2, H, generator=generator(1)) + 1.0
    balance = Balance([router], ["m.router"], config=CONFIG, world=layer.groups["world"])
    imbalance = []
    for _ in range(60):
        layer.moe(hidden, SequenceLayout.of_rows(29))
        balance.finish(applied=True)
        (load,) = balance.report()
        assert sum(load.tokens) == 29 * 2 * 2
        imbalance.append(load.imbalance)
    assert imbalance[0] > 1.8
    assert max(imbalance[-5:]) < 1.5, "a step of the rate turns a few tokens"


def test_unknown_routers_are_refused():
    build = make_layer_build(ProcessGroupCollection.single(), hidden_size=H)
    router = Router("d.router", config=CONFIG, build=build)
    with pytest.raises(ValueError, match=r"d\.router"):
        Balance([router], NAMES, config=CONFIG, world=build.store.groups["world"])
