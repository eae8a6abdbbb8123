# SPDX-License-Identifier: Apache-2.0
"""Tokens on their way to experts and back: results, bytes, and what is computed meanwhile."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.moe.dispatch import choose_dispatcher, dispatched_rows
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import WgradQueue
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.comm.noted_link import Noting, marked
from tests.unit_tests.core.moe.single_layer import Layer, Piece, merged

S, B, H, EXPERTS = 6, 3, 10, 8
DISPATCHERS = ("allgather", "alltoall")
#: One expert that all tokens want, on the last ranks.
HEAP = 6
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


def test_auto_is_what_moves_less():
    for topk, ep, etp, tokens in itertools.product(range(1, 9), (1, 2, 4, 8), (1, 2), (1, 7)):
        rows = {
            name: dispatched_rows(name, tokens=tokens, topk=topk, etp=etp, ep=ep)
            for name in DISPATCHERS
        }
        found = choose_dispatcher("auto", topk=topk, ep=ep)
        assert rows[found] == min(rows.values())
        assert (found == "allgather") == (ep < topk)
        for name in DISPATCHERS:
            assert choose_dispatcher(name, topk=topk, ep=ep) == name
    with pytest.raises(ValueError, match="moe-token-dispatcher-type 'flex': use auto, allgather"):
        choose_dispatcher("flex", topk=1, ep=1)


def bias_of(name: str) -> torch.Tensor | None:
    """Return biases that choose."""
    if not CONFIGS[name].router.expert_bias:
        return None
    return torch.zeros(EXPERTS).index_fill_(0, torch.tensor([HEAP]), 5.0)


def data_of_rank(lane: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a lane's hidden states and factors of its output, [s, b, h]."""
    return tuple(torch.randn(S, B, H, generator=generator(lane, i)) for i in range(2))


@dataclass
class Ran:
    """What one rank did."""

    lane: int
    part: slice
    tensors: dict[str, torch.Tensor]
    gradients: list[Piece]
    records: list[tuple[str, int]] = field(default_factory=list)


def on_grids(
    rank: int, world: int, names: list[str], degrees: dict[str, Any], sequence_parallel: bool
) -> list[list[Ran]]:
    """Run all layers."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    return [on_grid(groups, name, sequence_parallel) for name in names]


def on_grid(groups: ProcessGroupCollection, name: str, sequence_parallel: bool) -> list[Ran]:
    """Run a layer with every dispatcher."""
    found, lane, tp = [], groups["dense_dp"].rank, groups["tp"]
    hidden, factors = data_of_rank(lane)
    part = slice(0, S)
    if sequence_parallel:
        part = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size)
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
            layer.moe(hidden[part], layout)
        with trace(groups) as records, simulated(groups, link), nan_memory():
            out, dx = layer.step(hidden[part], factors[part], layout)
        assert link.count > 0
        among = [r for r in forward if r.group == "etp_ep"]
        assert (
            len([r for r in records if r.group == "etp_ep"])
            == {
                "allgather": len(among) + 3,  # of rows, of weights and of results
                "alltoall": len(among) + 2,
            }[dispatcher]
        )
        brief = [(r.kind, r.bytes) for r in among]
        found.append(Ran(lane, part, {"out": out, "dx": dx}, layer.gradients(), brief))
    return found


class Reference:
    """The layer in a single process, lane after lane."""

    def __init__(self, name: str, lanes: int) -> None:
        self.lanes: list[dict[str, torch.Tensor]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.chosen = torch.zeros(EXPERTS, dtype=torch.float64)
        with one_thread():
            for lane in range(lanes):
                layer = Layer(CONFIGS[name], hidden_size=H, bias=bias_of(name))
                layer.assert_sure(data_of_rank(lane)[0])
                out, dx = layer.step(*data_of_rank(lane))
                self.lanes.append({"out": out, "dx": dx})
                for key, gradient in merged(layer.gradients()).items():
                    self.gradients[key] = self.gradients.get(key, 0) + gradient
                self.chosen += layer.moe.router.counted[:EXPERTS]


def expected_forward(dispatcher: str, degrees: dict[str, Any], local: float) -> list:
    """Return the collectives of a forward in which `local` places want a rank's experts."""
    etp, ep, tp = (degrees.get(axis, 1) for axis in ("etp", "ep", "tp"))
    tokens, n = S * B // tp, etp * ep
    topk = CONFIGS["uneven"].router.topk
    rows = dispatched_rows(dispatcher, tokens=tokens, topk=topk, etp=etp, ep=ep)
    if dispatcher == "allgather":
        assert rows == tokens * n
        wide = 4 * H * rows
        routes = [("all_gather", 8 * topk * tokens * n), ("all_gather", 4 * topk * tokens * n)]
        return [("all_gather", wide), *routes, ("reduce_scatter", wide)]
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
def test_ranks_equal_one_process(degrees: dict, world: int, scattered: bool):
    tp = degrees.get("tp", 1)
    names = list(CONFIGS) if tp == 1 else list(CONFIGS)[:2]  # room is that of a rank's tokens
    runs = run_ranks(on_grids, world, names, degrees, scattered)
    for index, name in enumerate(names):
        wanted = Reference(name, world // tp)
        compare(name, degrees, [run[index] for run in runs], wanted)


def compare(name: str, degrees: dict, runs: list[list[Ran]], wanted: Reference) -> None:
    """Compare what all ranks found with every dispatcher."""
    if name == "one expert for all":
        assert wanted.chosen.nonzero().flatten().tolist() == [HEAP], "ranks without rows"
    for number, dispatcher in enumerate(DISPATCHERS):
        found = [run[number] for run in runs]
        for ran in found:
            reference = {k: v[ran.part] for k, v in wanted.lanes[ran.lane].items()}
            assert_all_close(ran.tensors, reference, bound=5e-6)
        gradients = merged([piece for ran in found for piece in ran.gradients])
        assert_all_close(gradients, wanted.gradients, bound=5e-6)
        if name != "uneven":
            continue
        each = EXPERTS // degrees.get("ep", 1)
        for rank, ran in enumerate(found):
            first = rank // degrees.get("etp", 1) * each
            local = wanted.chosen[first : first + each].sum().item()
            assert ran.records == expected_forward(dispatcher, degrees, local), dispatcher


class Noted(nn.Module):
    """A shared expert that notes its forward and its backward."""

    def __init__(self, inner: nn.Module, events: list[str]) -> None:
        super().__init__()
        self.inner, self.events = inner, events

    def forward(self, hidden: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        out = self.inner(marked(hidden, self.events, "shared begins"), layout)
        return marked(out, self.events, "shared ends")


def overlapping(rank: int, world: int, degrees: dict[str, int]) -> None:
    """See what is under way while the shared expert runs, forward and backward."""
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
        layer.moe.shared = Noted(layer.moe.shared, events)
        with simulated(groups, Noting(events)) as link:
            layer.step(*data_of_rank(rank))
        there, back = {
            "allgather": ("all_gather", "reduce_scatter"),
            "alltoall": ("all_to_all", "all_to_all"),
        }[dispatcher]
        marks = ("shared begins", "shared ends", "shared ends back", "shared begins back")
        found = [link.around(mark) for mark in marks]
        wanted = [[there]] * 2 + [[back]] * 2 if overlaps else [[]] * 4
        assert found == wanted, (dispatcher, overlaps, events)


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"etp": 2}])
def test_the_shared_expert_runs_while_rows_are_under_way(degrees: dict[str, int]):
    run_ranks(overlapping, 2, degrees)


def in_halves(rank: int, world: int, degrees: dict[str, int]) -> None:
    """Split backward: nothing is put before the queue is drained, and then the same bits."""
    torch.set_num_threads(1)
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    hidden, factors = data_of_rank(groups["dense_dp"].rank)
    for dispatcher, name in itertools.product(DISPATCHERS, ("uneven", "one expert for all")):
        layer = Layer(
            CONFIGS[name], groups, hidden_size=H, bias=bias_of(name), dispatcher=dispatcher
        )
        handles = list(layer.store.handles.values())
        out, dx = layer.step(hidden, factors)
        wanted = [handle.main_grad.clone() for handle in handles]
        assert all(bits.isfinite().all() for bits in wanted)
        for splits in (False, True):
            layer.store.splits = splits
            layer.engine.begin_step()
            for handle in handles:
                handle.main_grad.fill_(7.0)
            x = hidden.clone().requires_grad_(True)
            got = layer.moe(x, SequenceLayout.of_rows(S))
            with layer.store.defer() as queue:
                layer.engine.backward((got * factors).sum(), last=False)
            assert torch.equal(got, out)
            assert torch.equal(x.grad, dx)
            assert all((handle.main_grad == 7.0).all() for handle in handles), "put too early"
            assert len(queue) >= len(handles)
            drained(layer, queue)
            for handle, bits in zip(handles, wanted, strict=True):
                assert torch.equal(handle.main_grad, bits), handle.name


def drained(layer: Layer, queue: WgradQueue) -> None:
    """Carry out the second half, which sends no rows."""
    layer.engine.begin_last_backward(0)
    with trace(layer.groups) as records:
        queue.drain()
    assert not [r for r in records if r.group == "etp_ep"]
    layer.engine.post_backward(0)
    layer.engine.finish()


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2, "etp": 2}])
def test_weight_gradients_can_wait(degrees: dict[str, int]):
    run_ranks(in_halves, 2, degrees)
