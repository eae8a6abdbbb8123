# SPDX-License-Identifier: Apache-2.0
"""Host reads of MoE layers on several ranks: one per layer without a capacity, none with one."""

from __future__ import annotations

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe import MoEConfig, RouterConfig
from tests.support.device_products import products_of_a_gpu
from tests.support.host_reads import HostReads
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.moe.single_layer import Layer

S, B, H = 6, 2, 16
CONFIG = MoEConfig(num_experts=8, ffn_hidden_size=8, router=RouterConfig(topk=2))
#: All optional features of a layer.
FEATURES = MoEConfig(
    num_experts=8,
    ffn_hidden_size=8,
    router=RouterConfig(
        topk=2,
        score_function="sigmoid",
        num_groups=4,
        group_topk=2,
        expert_bias=True,
        balance="aux_loss",
        aux_loss_coeff=0.1,
        z_loss_coeff=0.1,
        jitter=0.1,
    ),
    capacity_factor=1.2,
    shared_ffn_hidden_size=8,
    shared_gate=True,
)
#: Host reads of a layer: the sizes of its all-to-all, or the number of rows of its experts.
READ = {"alltoall": ["tolist"], "allgather": ["aten._local_scalar_dense"]}


def layer_host_reads(
    rank: int, world: int, degrees: dict[str, int], config: MoEConfig
) -> dict[tuple[str, bool], tuple[list[str], list[str]]]:
    """Return the host reads of forward and backward by (dispatcher, has a training capacity)."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    hidden = torch.randn(S, B, H, generator=generator(rank))
    plain = SequenceLayout.of_rows(S)
    reads = {}
    for dispatcher in READ:
        for factor in (None, 2.0):
            layer = Layer(
                config,
                groups,
                hidden_size=H,
                dispatcher=dispatcher,
                expert_rank_capacity_factor=factor,
            )
            layout = plain if factor is None else plain.with_samples(torch.arange(B))
            x = hidden.clone().requires_grad_(True)
            layer.engine.begin_step()
            with products_of_a_gpu():
                with HostReads() as forward:
                    out = layer.moe(x, layout, aux_factor=torch.ones(()))
                with HostReads() as backward:
                    out.square().sum().backward()
            assert x.grad is not None
            assert x.grad.abs().sum() > 0.0
            reads[dispatcher, factor is not None] = forward.names, backward.names
    return reads


@pytest.mark.parametrize(
    ("degrees", "config"),
    [({"ep": 2}, CONFIG), ({"ep": 2}, FEATURES), ({"ep": 2, "etp": 2, "tp": 2}, CONFIG)],
    ids=["ep", "ep, features", "etp"],
)
def test_layer_reads_sizes_once_or_never_with_capacity(degrees, config):
    world = 4 if "etp" in degrees else 2
    for reads in run_ranks(layer_host_reads, world, degrees, config):
        for (dispatcher, has_capacity), (forward, backward) in reads.items():
            assert forward == ([] if has_capacity else READ[dispatcher])
            assert backward == []


def test_single_rank_makes_no_host_reads():
    for reads in run_ranks(layer_host_reads, 1, {}, FEATURES):
        assert set(map(str, reads.values())) == {"([], [])"}
