# SPDX-License-Identifier: Apache-2.0
"""The exchange of tokens for heads: a slice of the whole on every rank, in one all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.all_to_all import gather_heads, scatter_heads
from megatron.core.ops.causal_conv1d import causal_conv1d
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.context_parallel.test_host import reads

ROWS, HEADS, WIDTH, LAYERS = 3, 8, 5, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of 48 tokens.

    Args:
        documents: cu_seqlens of each row's documents, by place; None is one a row.
        apart: cut the sequences (of equal rows) by themselves.
        padded: cu_seqlens of these with padding.
    """

    order: str = "zigzag"
    length: int = 48
    documents: tuple[tuple[int, ...], ...] | None = None
    apart: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None

    def cut(self, size: int) -> SequenceSharding:
        return SequenceSharding.of(
            self.length,
            size,
            order=self.order,
            cu_seqlens=self.apart,
            padded_cu_seqlens=self.padded,
        )

    def ids(self) -> torch.Tensor | None:
        """Return [b, s], the number of each token's document in its row."""
        if self.documents is None:
            return None
        lengths = [[b - a for a, b in pairwise(row)] for row in self.documents]
        return torch.stack(
            [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths]
        )


CASES = {
    "dense": Case(),
    "contiguous": Case(order="contiguous"),
    "documents": Case(documents=((0, 5, 6, 17, 48), (0, 48), (0, 31, 48))),
    "cut apart": Case(apart=(0, 8, 24, 48)),
    "padded": Case(length=37, apart=(0, 3, 21, 37), padded=(0, 8, 32, 48)),
}


def whole(name: str, case: Case, width: int) -> torch.Tensor:
    """Return whole rows [s, b, heads, width], all different."""
    return torch.randn(case.length, ROWS, HEADS, width, generator=generator(5, *name.encode()))


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return [t, ...] of whole rows [s, b, ...]: row after row, so document after document."""
    return x.transpose(0, 1).flatten(0, 1)


def there(x, layout, group):
    """Return packed tokens [t, n/cp, w]."""
    rows, places = scatter_heads(x, layout, group)
    return rows if places is None else places.pack(rows)


def back_again(y, layout, group):
    """Return own tokens [s/cp, b, n, w]."""
    return gather_heads(y, layout, group).joined().unflatten(0, (layout.positions.shape[0], -1))


def exchanged(rank: int, world: int):
    """Exchange there and back, forward and backward, in two layers; return what failed."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    group, found = groups["cp"], {}
    heads = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    for name, case in CASES.items():
        layout = SequenceLayout.make(case.cut(world), rank, rows=ROWS, document_ids=case.ids())
        real = layout.row_indices >= 0
        x, d_x = whole("x", case, WIDTH), whole("d_x", case, WIDTH)
        y, d_y = whole("y", case, 2), whole("d_y", case, 2)

        def here(rows, layout=layout, real=real):  # large numbers where there is padding
            return torch.where(real[:, None, None, None], rows[layout.row_indices], 1e3)

        bad = []
        with trace(groups) as records:
            for _ in range(LAYERS):
                wide = torch.cat([here(x), here(x)], 3)
                leaf = wide[..., :WIDTH].detach().requires_grad_()  # a slice: strided
                back = packed(y[:, :, heads]).clone().requires_grad_()
                sent, returned = there(leaf, layout, group), back_again(back, layout, group)
                torch.autograd.backward((sent,), (packed(d_x[:, :, heads]),))
                torch.autograd.backward((returned,), (here(d_y),))
                pairs = {
                    "sent": (sent, packed(x[:, :, heads])),
                    "its gradient": (leaf.grad[real], here(d_x)[real]),
                    "gradient of padding": (leaf.grad[~real], torch.zeros_like(leaf[~real])),
                    "returned": (returned[real], here(y)[real]),
                    "padding": (returned[~real], torch.zeros_like(returned[~real])),
                    "its gradient, too": (back.grad, packed(d_y[:, :, heads])),
                }
                bad += [what for what, (got, want) in pairs.items() if not torch.equal(got, want)]
        counts = (len(records), {record.kind for record in records}, layout.num_maps)
        found[name] = (bad, counts, [record.bytes for record in records][:4], int((~real).sum()))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_whole_rows_of_its_heads(size):
    ranks = run_ranks(exchanged, size)
    for name, case in CASES.items():
        local = case.cut(size).local_length * ROWS * HEADS * 4
        for found in ranks:
            bad, counts, moved, _ = found[name]
            assert bad == [], name
            assert counts == (4 * LAYERS, {"all_to_all"}, 1), name
            assert moved == [local * WIDTH, local * 2, local * WIDTH, local * 2], name
    assert sum(found["padded"][3] for found in ranks) == 48 - 37


def counted(rank: int, world: int):
    """Return what a layer needs, by the sequences that are packed: collectives, and reads of what
    is on the device once an earlier layer has made the maps."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    found = {}
    for count in (1, 4, 64):
        cut = SequenceSharding.of(256, world, cu_seqlens=range(0, 257, 256 // count))
        layout = SequenceLayout.make(cut, rank, rows=1)
        x = torch.randn(256 // world, 1, HEADS, WIDTH, requires_grad=True)
        weight = torch.randn(HEADS // world, WIDTH, 4)
        for _ in range(2):
            with trace(groups) as records, reads() as seen:
                mixed, _ = causal_conv1d(
                    there(x, layout, groups["cp"]),
                    weight,
                    None,
                    sequences=layout.whole_rows(1).sequences,
                    activation="silu",
                )
                out = back_again(mixed, layout, groups["cp"])
                torch.autograd.grad(out.square().sum(), x)
        found[count] = (len(records), seen, layout.whole_rows(1).sequences.count)
    return found


def test_layer_runs_four_collectives_and_no_host_reads():
    for found in run_ranks(counted, 2):
        assert found == {count: (4, [], count) for count in (1, 4, 64)}


@pytest.mark.parametrize("batch", [1, 3])
def test_one_rank_packs_only(batch):
    layout, group = SequenceLayout.of_rows(6), Group.single("cp")
    wide = torch.randn(6, batch, 4, 9, requires_grad=True)
    sent = there(wide[..., :5], layout, group)
    assert torch.equal(sent, packed(wide[..., :5]))
    assert (sent.data_ptr() == wide.data_ptr()) == (batch == 1)
    returned = back_again(sent, layout, group)
    assert torch.equal(returned, wide[..., :5])
    (grad,) = torch.autograd.grad(returned.square().sum(), wide)
    assert torch.equal(grad, torch.cat([2 * wide[..., :5], torch.zeros(6, batch, 4, 4)], 3))
    assert layout.num_maps == 1


def unfit(rank: int, world: int):
    """Return what is said of what does not fit."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    group, layout = groups["cp"], SequenceLayout.make(SequenceSharding.of(8, world), rank, rows=1)
    calls = {
        "heads": lambda: scatter_heads(torch.ones(4, 1, 3, 2), layout, group),
        "tokens": lambda: scatter_heads(torch.ones(8, 1, 4, 2), layout, group),
        "cut": lambda: scatter_heads(torch.ones(8, 1, 4, 2), SequenceLayout.of_rows(8), group),
        "rows": lambda: gather_heads(torch.ones(7, 2, 2), SequenceLayout.of_rows(4), group),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def test_what_does_not_fit_is_refused():
    for found in run_ranks(unfit, 2):
        assert found["heads"] == (
            "3 heads do not divide over 2 context parallel ranks: use linear-cp-mode segments"
        )
        assert found["tokens"].startswith("8 tokens a row on each of 2 context parallel ranks")
        assert found["cut"].startswith("8 tokens a row on each of 2 context parallel ranks")
        assert found["rows"] == "7 tokens are no rows of 4"
