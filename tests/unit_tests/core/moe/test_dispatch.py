# SPDX-License-Identifier: Apache-2.0
"""Dispatch of tokens to experts and back: outputs, bytes, and overlap with the shared expert."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.moe.dispatch import choose_dispatcher, dispatched_rows
from megatron.core.weight_gather import WgradQueue
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.comm.noted_link import RecordingLink, marked
from tests.unit_tests.core.moe.single_layer import Layer, Shard, merged

S, B, H, EXPERTS = 6, 3, 10, 8
DISPATCHERS = ("allgather", "alltoall")
#: The expert that all tokens choose, on the last ranks.
HOT_EXPERT = 6
CONFIGS = {
    "uneven": MoEConfig(
        num_experts=EXPERTS,
        ffn_hidden_size=6,
        router=RouterConfig(topk=3),
        shared_ffn_hidden_size=4,
        shared_gate=True,
    ),
    "one expert for all": MoEConfig(
        num_experts=EXPERTS,
        ffn_hidden_size=6,
        router=RouterConfig(topk=1, score_function="sigmoid", normalize=False, expert_bias=True),
        gated=False,
        activation="gelu",
    ),
    "some dropped": MoEConfig(
        num_experts=EXPERTS, ffn_hidden_size=6, router=RouterConfig(topk=2), capacity_factor=0.6
    ),
}


def test_auto_picks_dispatcher_with_fewest_rows():
    for topk, ep, etp, tokens in itertools.product(range(1, 9), (1, 2, 4, 8), (1, 2), (1, 7)):
        rows = {
            name: dispatched_rows(name, tokens=tokens, topk=topk, etp=etp, ep=ep)
            for name in DISPATCHERS
        }
        dispatcher = choose_dispatcher("auto", topk=topk, ep=ep)
        assert rows[dispatcher] == min(rows.values())
        assert (dispatcher == "allgather") == (ep < topk)
        for name in DISPATCHERS:
            assert choose_dispatcher(name, topk=topk, ep=ep) == name
    with pytest.raises(ValueError, match="'flex'"):
        choose_dispatcher("flex", topk=1, ep=1)


def bias_of(name: str) -> torch.Tensor | None:
    """Return biases that force the choice of one expert, or None."""
    if not CONFIGS[name].router.expert_bias:
        return None
    return torch.zeros(EXPERTS).index_fill_(0, torch.tensor([HOT_EXPERT]), 5.0)


def inputs_of_rank(dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a data-parallel rank's hidden states and factors of its output, [s, b, h]."""
    return tuple(torch.randn(S, B, H, generator=generator(dp_rank, i)) for i in range(2))


@dataclass
class RankRun:
    """The tensors and collectives of one rank."""

    dp_rank: int
    seq_slice: slice
    tensors: dict[str, torch.Tensor]
    gradients: list[Shard]
    records: list[tuple[str, int]] = field(default_factory=list)


def run_layers(
    rank: int, world: int, names: list[str], degrees: dict[str, Any], sequence_parallel: bool
) -> list[list[RankRun]]:
    """Run the layers of all named configurations."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    return [run_layer(groups, name, sequence_parallel) for name in names]


def run_layer(groups: ProcessGroupCollection, name: str, sequence_parallel: bool) -> list[RankRun]:
    """Run a layer with every dispatcher."""
    runs, dp_rank, tp = [], groups["dense_dp"].rank, groups["tp"]
    hidden, factors = inputs_of_rank(dp_rank)
    seq_slice = slice(0, S)
    if sequence_parallel:
        seq_slice = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size)
    for dispatcher, link in zip(DISPATCHERS, (Late(), Early()), strict=True):
        layer = Layer(
            CONFIGS[name],
            groups,
            hidden_size=H,
            bias=bias_of(name),
            sequence_parallel=sequence_parallel,
            dispatcher=dispatcher,
        )
        layout = SequenceLayout.of_rows(S)
        with torch.no_grad(), trace(groups) as forward:
            layer.moe(hidden[seq_slice], layout)
        with trace(groups) as records, simulated(groups, link), nan_memory():
            out, dx = layer.step(hidden[seq_slice], factors[seq_slice], layout)
        assert link.count > 0
        dispatched = [r for r in forward if r.group == "etp_ep"]
        assert (
            len([r for r in records if r.group == "etp_ep"])
            == {
                "allgather": len(dispatched) + 3,  # rows, weights and outputs
                "alltoall": len(dispatched) + 2,
            }[dispatcher]
        )
        brief = [(r.kind, r.bytes) for r in dispatched]
        runs.append(RankRun(dp_rank, seq_slice, {"out": out, "dx": dx}, layer.gradients(), brief))
    return runs


class Reference:
    """The layer in a single process, one data-parallel rank after the other."""

    def __init__(self, name: str, dp_size: int) -> None:
        self.per_rank: list[dict[str, torch.Tensor]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.chosen = torch.zeros(EXPERTS, dtype=torch.float64)
        with one_thread():
            for dp_rank in range(dp_size):
                layer = Layer(CONFIGS[name], hidden_size=H, bias=bias_of(name))
                layer.assert_stable_routes(inputs_of_rank(dp_rank)[0])
                out, dx = layer.step(*inputs_of_rank(dp_rank))
                self.per_rank.append({"out": out, "dx": dx})
                for key, gradient in merged(layer.gradients()).items():
                    self.gradients[key] = self.gradients.get(key, 0) + gradient
                self.chosen += layer.moe.router.counted[:EXPERTS]


def expected_forward(dispatcher: str, degrees: dict[str, Any], local: float) -> list:
    """Return the collectives of a forward in which `local` tokens choose a rank's experts."""
    etp, ep, tp = (degrees.get(axis, 1) for axis in ("etp", "ep", "tp"))
    tokens, n = S * B // tp, etp * ep
    topk = CONFIGS["uneven"].router.topk
    rows = dispatched_rows(dispatcher, tokens=tokens, topk=topk, etp=etp, ep=ep)
    if dispatcher == "allgather":
        assert rows == tokens * n
        num_bytes = 4 * H * rows
        routes = [("all_gather", 8 * topk * tokens * n), ("all_gather", 4 * topk * tokens * n)]
        return [("all_gather", num_bytes), *routes, ("reduce_scatter", num_bytes)]
    return [
        ("all_gather", 8 * EXPERTS * n),
        ("all_to_all", 4 * H * rows),
        ("all_to_all", 4 * H * int(local)),
    ]


GRIDS = (
    ({"ep": 2}, 2, False),
    ({"etp": 2}, 2, False),
    ({"ep": 4}, 4, False),
    ({"etp": 2, "ep": 2}, 4, False),
    ({"tp": 2, "etp": 1, "ep": 4}, 4, False),
    ({"tp": 2, "etp": 2, "ep": 2}, 4, True),
)


@pytest.mark.parametrize(("degrees", "world", "scattered"), GRIDS)
def test_ranks_match_one_process(degrees: dict, world: int, scattered: bool):
    tp = degrees.get("tp", 1)
    names = list(CONFIGS) if tp == 1 else list(CONFIGS)[:2]  # capacity counts a rank's tokens
    runs = run_ranks(run_layers, world, names, degrees, scattered)
    for index, name in enumerate(names):
        reference = Reference(name, world // tp)
        compare(name, degrees, [run[index] for run in runs], reference)


def compare(name: str, degrees: dict, runs: list[list[RankRun]], reference: Reference) -> None:
    """Compare all ranks' outputs and gradients with the reference, for every dispatcher."""
    if name == "one expert for all":
        assert reference.chosen.nonzero().flatten().tolist() == [HOT_EXPERT], "ranks without rows"
    for number, dispatcher in enumerate(DISPATCHERS):
        rank_runs = [run[number] for run in runs]
        for ran in rank_runs:
            expected = {k: v[ran.seq_slice] for k, v in reference.per_rank[ran.dp_rank].items()}
            assert_all_close(ran.tensors, expected, bound=5e-6)
        gradients = merged([shard for ran in rank_runs for shard in ran.gradients])
        assert_all_close(gradients, reference.gradients, bound=5e-6)
        if name != "uneven":
            continue
        experts_per_rank = EXPERTS // degrees.get("ep", 1)
        for rank, ran in enumerate(rank_runs):
            expert_offset = rank // degrees.get("etp", 1) * experts_per_rank
            local = reference.chosen[expert_offset : expert_offset + experts_per_rank].sum().item()
            assert ran.records == expected_forward(dispatcher, degrees, local), dispatcher


class RecordingExpert(nn.Module):
    """A shared expert that records its forward and its backward."""

    def __init__(self, inner: nn.Module, events: list[str]) -> None:
        super().__init__()
        self.inner, self.events = inner, events

    def forward(self, hidden: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        out = self.inner(marked(hidden, self.events, "shared begins"), layout)
        return marked(out, self.events, "shared ends")


def check_overlap(rank: int, world: int, degrees: dict[str, int]) -> None:
    """Check which collectives are in flight while the shared expert runs, forward and backward."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    for dispatcher, overlaps in itertools.product(DISPATCHERS, (True, False)):
        layer = Layer(
            CONFIGS["uneven"],
            groups,
            hidden_size=H,
            dispatcher=dispatcher,
            overlap_shared_expert=overlaps,
        )
        events: list[str] = []
        layer.moe.shared = RecordingExpert(layer.moe.shared, events)
        with simulated(groups, RecordingLink(events)) as link:
            layer.step(*inputs_of_rank(rank))
        dispatch_op, combine_op = {
            "allgather": ("all_gather", "reduce_scatter"),
            "alltoall": ("all_to_all", "all_to_all"),
        }[dispatcher]
        marks = ("shared begins", "shared ends", "shared ends back", "shared begins back")
        actual = [link.around(mark) for mark in marks]
        expected = [[dispatch_op]] * 2 + [[combine_op]] * 2 if overlaps else [[]] * 4
        assert actual == expected, (dispatcher, overlaps, events)


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"etp": 2}])
def test_shared_expert_overlaps_dispatch_and_combine(degrees: dict[str, int]):
    run_ranks(check_overlap, 2, degrees)


def check_split_backward(rank: int, world: int, degrees: dict[str, int]) -> None:
    """Check that a split backward writes no gradient before the drain, and then the same bits."""
    torch.set_num_threads(1)
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    hidden, factors = inputs_of_rank(groups["dense_dp"].rank)
    for dispatcher, name in itertools.product(DISPATCHERS, ("uneven", "one expert for all")):
        layer = Layer(
            CONFIGS[name], groups, hidden_size=H, bias=bias_of(name), dispatcher=dispatcher
        )
        handles = list(layer.store.handles.values())
        out, dx = layer.step(hidden, factors)
        expected = [handle.main_grad.clone() for handle in handles]
        assert all(bits.isfinite().all() for bits in expected)
        for splits in (False, True):
            layer.store.splits = splits
            layer.engine.begin_step()
            for handle in handles:
                handle.main_grad.fill_(7.0)
            x = hidden.clone().requires_grad_(True)
            output = layer.moe(x, SequenceLayout.of_rows(S))
            with layer.store.defer() as queue:
                layer.engine.backward((output * factors).sum(), last=False)
            assert torch.equal(output, out)
            assert torch.equal(x.grad, dx)
            assert all((handle.main_grad == 7.0).all() for handle in handles), "written too early"
            assert len(queue) >= len(handles)
            drain_weight_gradients(layer, queue)
            for handle, bits in zip(handles, expected, strict=True):
                assert torch.equal(handle.main_grad, bits), handle.name


def drain_weight_gradients(layer: Layer, queue: WgradQueue) -> None:
    """Compute the deferred weight gradients, which sends no rows."""
    layer.engine.begin_last_backward(0)
    with trace(layer.groups) as records:
        queue.drain()
    assert not [r for r in records if r.group == "etp_ep"]
    layer.engine.post_backward(0)
    layer.engine.finish()


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2, "etp": 2}])
def test_deferred_weight_gradients_are_bit_identical(degrees: dict[str, int]):
    run_ranks(check_split_backward, 2, degrees)
