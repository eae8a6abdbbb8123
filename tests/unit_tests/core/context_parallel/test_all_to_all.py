# SPDX-License-Identifier: Apache-2.0
"""The all-to-all that exchanges tokens for heads: each rank gets whole rows of its heads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.all_to_all import gather_heads, scatter_heads
from megatron.core.ops.recurrence import causal_conv1d
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.context_parallel.test_host import host_reads

ROWS, HEADS, WIDTH, LAYERS = 3, 8, 5, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of 48 tokens.

    Args:
        documents: cu_seqlens of each row's documents; None is one document per row.
        cu_seqlens: sequences that are sharded separately, the same in all rows.
        padded_cu_seqlens: `cu_seqlens` with padding.
    """

    order: str = "zigzag"
    length: int = 48
    documents: tuple[tuple[int, ...], ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    padded_cu_seqlens: tuple[int, ...] | None = None

    def sharding(self, size: int) -> SequenceSharding:
        return SequenceSharding.of(
            self.length,
            size,
            order=self.order,
            cu_seqlens=self.cu_seqlens,
            padded_cu_seqlens=self.padded_cu_seqlens,
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
    "separate sequences": Case(cu_seqlens=(0, 8, 24, 48)),
    "padded": Case(length=37, cu_seqlens=(0, 3, 21, 37), padded_cu_seqlens=(0, 8, 32, 48)),
}


def random_rows(name: str, case: Case, width: int) -> torch.Tensor:
    """Return random whole rows [s, b, heads, width]."""
    return torch.randn(case.length, ROWS, HEADS, width, generator=generator(5, *name.encode()))


def pack_rows(x: torch.Tensor) -> torch.Tensor:
    """Pack whole rows [s, b, ...] into [t, ...], row after row and so document after document."""
    return x.transpose(0, 1).flatten(0, 1)


def scatter_and_pack(x, layout, group):
    """Return packed tokens [t, n/cp, w]."""
    rows, packing = scatter_heads(x, layout, group)
    return rows if packing is None else packing.pack(rows)


def gather_and_join(y, layout, group):
    """Return the rank's tokens [s/cp, b, n, w]."""
    return gather_heads(y, layout, group).joined().unflatten(0, (layout.positions.shape[0], -1))


def run_exchange(rank: int, world: int):
    """Run both exchanges in two layers, forward and backward.

    Returns:
        {case: (mismatches, counts, sent bytes, number of padding tokens)}.
    """
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    group, results = groups["cp"], {}
    heads = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    for name, case in CASES.items():
        layout = SequenceLayout.make(case.sharding(world), rank, rows=ROWS, document_ids=case.ids())
        real = layout.row_indices >= 0
        x, d_x = random_rows("x", case, WIDTH), random_rows("d_x", case, WIDTH)
        y, d_y = random_rows("y", case, 2), random_rows("d_y", case, 2)

        def local_rows(rows, layout=layout, real=real):  # padding gets a large number
            return torch.where(real[:, None, None, None], rows[layout.row_indices], 1e3)

        mismatches = []
        with trace(groups) as records:
            for _ in range(LAYERS):
                doubled = torch.cat([local_rows(x), local_rows(x)], 3)
                leaf = doubled[..., :WIDTH].detach().requires_grad_()  # a slice: strided
                head_leaf = pack_rows(y[:, :, heads]).clone().requires_grad_()
                by_heads = scatter_and_pack(leaf, layout, group)
                by_tokens = gather_and_join(head_leaf, layout, group)
                torch.autograd.backward((by_heads,), (pack_rows(d_x[:, :, heads]),))
                torch.autograd.backward((by_tokens,), (local_rows(d_y),))
                pairs = {
                    "scattered heads": (by_heads, pack_rows(x[:, :, heads])),
                    "gradient of tokens": (leaf.grad[real], local_rows(d_x)[real]),
                    "gradient of padding": (leaf.grad[~real], torch.zeros_like(leaf[~real])),
                    "gathered tokens": (by_tokens[real], local_rows(y)[real]),
                    "padding": (by_tokens[~real], torch.zeros_like(by_tokens[~real])),
                    "gradient of heads": (head_leaf.grad, pack_rows(d_y[:, :, heads])),
                }
                mismatches += [
                    tensor_name
                    for tensor_name, (actual, expected) in pairs.items()
                    if not torch.equal(actual, expected)
                ]
        counts = (len(records), {record.kind for record in records}, layout.num_maps)
        results[name] = (
            mismatches,
            counts,
            [record.bytes for record in records][:4],
            int((~real).sum()),
        )
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_whole_rows_of_its_heads(size):
    ranks = run_ranks(run_exchange, size)
    for name, case in CASES.items():
        local = case.sharding(size).local_length * ROWS * HEADS * 4
        for results in ranks:
            mismatches, counts, sent_bytes, _ = results[name]
            assert mismatches == [], name
            assert counts == (4 * LAYERS, {"all_to_all"}, 1), name
            assert sent_bytes == [local * WIDTH, local * 2, local * WIDTH, local * 2], name
    assert sum(results["padded"][3] for results in ranks) == 48 - 37


def count_collectives_and_reads(rank: int, world: int):
    """Return the collectives and host reads of a layer, by the number of packed sequences; an
    earlier layer has built the index maps."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    results = {}
    for count in (1, 4, 64):
        sharding = SequenceSharding.of(256, world, cu_seqlens=range(0, 257, 256 // count))
        layout = SequenceLayout.make(sharding, rank, rows=1)
        x = torch.randn(256 // world, 1, HEADS, WIDTH, requires_grad=True)
        weight = torch.randn(HEADS // world, WIDTH, 4)
        for _ in range(2):
            with trace(groups) as records, host_reads() as read_names:
                mixed, _ = causal_conv1d(
                    scatter_and_pack(x, layout, groups["cp"]),
                    weight,
                    None,
                    sequences=layout.whole_rows(1).sequences,
                    activation="silu",
                )
                out = gather_and_join(mixed, layout, groups["cp"])
                torch.autograd.grad(out.square().sum(), x)
        results[count] = (len(records), read_names, layout.whole_rows(1).sequences.count)
    return results


def test_layer_runs_four_collectives_and_no_host_reads():
    for results in run_ranks(count_collectives_and_reads, 2):
        assert results == {count: (4, [], count) for count in (1, 4, 64)}


@pytest.mark.parametrize("batch", [1, 3])
def test_single_rank_only_packs(batch):
    layout, group = SequenceLayout.of_rows(6), Group.single("cp")
    doubled = torch.randn(6, batch, 4, 9, requires_grad=True)
    by_heads = scatter_and_pack(doubled[..., :5], layout, group)
    assert torch.equal(by_heads, pack_rows(doubled[..., :5]))
    assert (by_heads.data_ptr() == doubled.data_ptr()) == (batch == 1)
    by_tokens = gather_and_join(by_heads, layout, group)
    assert torch.equal(by_tokens, doubled[..., :5])
    (grad,) = torch.autograd.grad(by_tokens.square().sum(), doubled)
    assert torch.equal(grad, torch.cat([2 * doubled[..., :5], torch.zeros(6, batch, 4, 4)], 3))
    assert layout.num_maps == 1


def collect_errors(rank: int, world: int):
    """Return the error messages of mismatched inputs."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    group, layout = groups["cp"], SequenceLayout.make(SequenceSharding.of(8, world), rank, rows=1)
    calls = {
        "heads": lambda: scatter_heads(torch.ones(4, 1, 3, 2), layout, group),
        "tokens": lambda: scatter_heads(torch.ones(8, 1, 4, 2), layout, group),
        "sharding": lambda: scatter_heads(torch.ones(8, 1, 4, 2), SequenceLayout.of_rows(8), group),
        "rows": lambda: gather_heads(torch.ones(7, 2, 2), SequenceLayout.of_rows(4), group),
    }
    results = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            results[name] = str(error)
    return results


def test_mismatched_inputs_are_refused():
    for results in run_ranks(collect_errors, 2):
        assert results["heads"] == (
            "3 heads do not divide over 2 context parallel ranks: use linear-cp-mode segments"
        )
        assert results["tokens"].startswith("8 tokens per row on each of 2 context")
        assert results["sharding"].startswith(
            "8 tokens per row on each of 2 context parallel ranks"
        )
        assert results["rows"] == "7 tokens are not a multiple of the row length 4"
