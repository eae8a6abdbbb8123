# SPDX-License-Identifier: Apache-2.0
"""Context parallelism from its options to a rank's microbatches, log lines and operations."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.context_parallel.blockwise import worth_blocks
from megatron.core.context_parallel.sequence_sharding import documents_of
from megatron.core.datasets import GPTBatch
from megatron.core.models.gpt import shift_targets
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.core_configs import backend
from megatron.training.distributed_context import rank_grid
from megatron.training.layouts import Layouts, needs_bounds, packed_cuts
from megatron.training.monitoring.flops import training_flops, visible_square, window_shares
from megatron.training.monitoring.log_line import Speedometer
from megatron.training.startup_report import cut_line
from megatron.training.startup_report.parallelism import context_line, context_words
from megatron.training.train_steps import microbatch, squared_lengths
from tests.support.ranks import run_ranks
from tests.unit_tests.training.small_config import small_config

CP, TP = "--context-parallel-size", "--tensor-model-parallel-size"


def test_context_parallel_ranks_are_not_data_parallel_ranks():
    run = resolve(small_config(f"{CP} 2 {TP} 2 --global-batch-size 12"), 8)
    assert (run.data_parallel_size, run.num_microbatches) == (2, 2)
    assert rank_grid(run) == RankGrid(world_size=8, tp=2, cp=2)
    assert backend(run.config).context_engine == "auto"
    chosen = resolve(small_config(f"{CP} 2 --cp-comm-type allgather"), 2).config
    assert backend(chosen).context_engine == "all_gather"


def test_log_names_context_engine_and_reason():
    assert context_line(resolve(small_config(), 1)) is None
    assert context_words(small_config()) == ""
    run = resolve(small_config(f"{CP} 2 {TP} 2"), 4)
    assert context_words(run.config) == "context parallel 2, "
    line = context_line(run)
    assert line is not None
    assert line.startswith("context parallel 2 by all_gather: fewest bytes sent per rank and layer")
    assert line.endswith("each rank has 10 of the 20 tokens of a sample")
    assert "not a2a: 3 query heads do not divide over 2" in line
    requested_line = context_line(resolve(small_config(f"{CP} 2 --cp-comm-type a2a"), 2))
    assert requested_line is not None
    assert requested_line.startswith("context parallel 2 by a2a: a2a was requested")


# --- microbatches ---------------------------------------------------------------------------------


def batch(documents: bool, length: int = 12, *, padded: bool = False) -> GPTBatch:
    """Return two rows; with `documents`, the second row has two, `padded` or not."""
    tokens = torch.arange(2 * (length + 1)).view(2, -1)
    document_fields = {}
    if documents:
        ids = torch.zeros(2, length, dtype=torch.int32)
        ids[1, 5:] = 1
        positions = torch.arange(length).repeat(2, 1)
        positions[1, 5:] -= 5
        document_fields = {"document_ids": ids, "positions": positions}
    if padded:
        document_fields["padding"] = torch.arange(2 * length).view(2, length) >= 2 * length - 3
    mask = torch.rand(2, length)
    return GPTBatch(
        tokens=tokens, loss_mask=mask, sample_ids=torch.arange(2) + 7, **document_fields
    )


#: Columns of 12 that each of two ranks has.
ZIGZAG = ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8])


def local_fields(rank: int, world: int, documents: bool):
    """Return this rank's shard of a batch."""
    torch.manual_seed(3)
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    assert groups["samples"].size == 1
    layouts = Layouts(groups["cp"], torch.device("cpu"))
    local = microbatch(batch(documents), torch.device("cpu"), layouts=layouts)
    # Single-document rows share one layout object, so its cached tables are reused.
    assert (layouts.of(batch(documents)) is layouts.of(batch(documents))) == (not documents)
    assert local.layout.sample_ids.tolist() == [7, 8]
    assert local.without_dropout.sample_ids is None, "only training passes sample ids"
    layout = local.layout
    return local.tokens, local.labels, local.loss_mask, layout.positions, layout.documents


@pytest.mark.parametrize("documents", [False, True])
def test_each_rank_gets_its_zigzag_columns(documents):
    torch.manual_seed(3)
    whole = batch(documents)
    for rank, (tokens, labels, mask, positions, bounds) in enumerate(
        run_ranks(local_fields, 2, documents)
    ):
        columns = ZIGZAG[rank]
        assert torch.equal(tokens, whole.input_ids[:, columns])
        assert torch.equal(labels, whole.labels[:, columns])
        assert torch.equal(mask, whole.loss_mask[:, columns])
        if documents:
            assert torch.equal(positions, whole.positions[:, columns].t())
            assert bounds == ((0, 12), (0, 5, 12))
        else:
            assert positions.tolist() == columns
            assert bounds is None


@pytest.mark.parametrize("documents", [False, True])
def test_mtp_targets_are_shifted_before_rows_are_sharded(documents):
    rows = batch(documents, padded=documents)
    cpu = torch.device("cpu")
    layouts = Layouts(Group.single("cp"), cpu)
    full = microbatch(rows, cpu, layouts=layouts, mtp_num_layers=3)
    row_fields = (rows.input_ids, rows.labels, rows.loss_mask)
    expected = shift_targets(
        *row_fields, num_layers=3, document_ids=rows.document_ids, padding=rows.padding
    )
    assert expected.tokens.shape == (3, 2, 12)
    fields = {name: x for name, x in vars(expected).items() if x is not None}
    assert len(fields) == 3 + documents
    assert all(torch.equal(getattr(full.mtp_targets, name), x) for name, x in fields.items())
    for rank, columns in enumerate(ZIGZAG):
        local = microbatch(
            rows,
            cpu,
            layouts=Layouts(Group("cp", (0, 1), rank, handle=object()), cpu),
            mtp_num_layers=3,
        )
        for name, x in fields.items():
            assert torch.equal(getattr(local.mtp_targets, name), x[..., columns]), name
        if documents:
            assert torch.equal(local.layout.padding.t(), rows.padding[:, columns])
        # The token after the last token of a rank's chunk belongs to the other rank.
        edge = columns.index(2) if rank == 0 else columns.index(8)
        assert torch.equal(
            local.mtp_targets.tokens[0, :, edge], rows.input_ids[:, columns[edge] + 1]
        )
    assert microbatch(rows, cpu, layouts=layouts).mtp_targets is None


def test_whole_row_documents_use_blocks_or_mask_by_cost():
    device, group = torch.device("cpu"), Group.single("cp")
    many_heads, one_head = {"block_heads": 64}, {"block_heads": 1}
    documents = batch(True, 80)
    assert worth_blocks(3, rows=2, length=80, heads=64)
    assert not worth_blocks(3, rows=2, length=80, heads=1)
    assert Layouts(group, device, **many_heads).of(batch(False)).documents is None
    for options in ({}, one_head):
        layout = Layouts(group, device, **options).of(documents)
        assert layout.documents is None
        assert torch.equal(layout.document_ids, documents.document_ids.t())
    layout = Layouts(group, device, **many_heads).of(documents)
    assert layout.documents == ((0, 80), (0, 5, 80))
    assert layout.document_ids is None
    local = microbatch(documents, device, layouts=Layouts(group, device, **many_heads))
    assert torch.equal(local.tokens, documents.input_ids)
    assert torch.equal(local.labels, documents.labels)


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        ("", "cuda", True),
        ("", "cpu", False),
        ("--attention-backend triton", "cuda", False),
        ("--cuda-graph-impl full_iteration", "cuda", False),
    ],
)
def test_fused_gpu_attention_needs_document_bounds(words, device, expected):
    """A CUDA graph needs no bounds: it replays any documents by their ids."""
    assert needs_bounds(small_config(words), torch.device(device)) == expected


@pytest.mark.parametrize("cut", ["row", "documents", "auto"])
def test_log_compares_attention_balance_of_both_cuts(cut):
    context = SimpleNamespace(groups=ProcessGroupCollection.single(), device=torch.device("cpu"))
    packed = "--reset-attention-mask --micro-batch-size 1"
    ring = f"{CP} 2 {packed} --cp-comm-type p2p"
    run = resolve(small_config(f"{ring} --context-parallel-cut {cut}"), 2)
    model = gpt_config(run.config, 61)
    cuts = packed_cuts(run, context, model)
    # Uneven when split by row: documents of three quarters and a quarter of the row.
    ids = torch.zeros(1, 8192, dtype=torch.int32)
    ids[:, 6144:] = 1
    uneven = GPTBatch(
        tokens=torch.zeros(1, 8193).long(),
        loss_mask=torch.ones(1, 8192),
        sample_ids=torch.arange(1),
        document_ids=ids,
    )
    even = dataclasses.replace(uneven, document_ids=torch.zeros_like(ids))
    line = cut_line(cuts, [uneven, uneven])
    assert "first 2 microbatches the slowest rank has 1.60 x" in line
    assert "1.00 x by documents, with 0.0% padding" in line
    assert line.endswith(f": {'row' if cut == 'row' else 'documents'}")
    mixed = cut_line(cuts, [uneven, even, even])
    expected = {"row": "row", "documents": "documents", "auto": "1 of them are split by documents"}
    assert mixed.endswith(f": {expected[cut]}")
    assert cut_line(cuts, []) is None
    # One-token documents have no imbalance to save, so "auto" does not accept their padding.
    short = dataclasses.replace(uneven, document_ids=torch.arange(8192).view(1, -1).int())
    assert (cuts.choice(documents_of(short.document_ids.numpy())).cut is None) == (
        cut != "documents"
    )
    # An engine that shards heads is balanced by row, too.
    head_sharded = resolve(small_config(f"{CP} 2 {packed} --cp-comm-type a2a"), 2)
    assert packed_cuts(head_sharded, context, model).choice([(0, 6144, 8192)]).row.imbalance == 1.0
    line = cut_line(packed_cuts(head_sharded, context, model), [uneven])
    assert "1.00 x the mean attention pairs by row" in line
    assert line.endswith("; auto: row")
    for flags in (packed, f"{CP} 2"):
        world = 2 if CP in flags else 1
        assert packed_cuts(resolve(small_config(flags), world), context, model) is None
    recurrent = dataclasses.replace(model, attention=None)
    assert packed_cuts(run, context, recurrent) is None


# --- operations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "window"), [(7, None), (7, 3), (7, 7), (7, 9), (1, 1)])
def test_visible_square_counts_windowed_attention_pairs(length, window):
    pairs = sum(min(q + 1, window or length) for q in range(length))
    # The triangle counts as half of the square, without half of the diagonal, as for n^2.
    assert visible_square(length, window) == 2 * pairs - min(length, window or length)


def test_window_reduces_counted_flops():
    run = resolve(small_config("--window-size 5 --global-batch-size 6"), 1)
    model = gpt_config(run.config, 128)
    shape = {"vocab_size": 128, "seq_length": 20, "samples": 6}
    unlimited = dataclasses.replace(
        model, attention=dataclasses.replace(model.attention, window=None)
    )
    unlimited_flops, windowed_flops = (
        training_flops(unlimited, **shape),
        training_flops(model, **shape),
    )
    squares = 20**2 - 5 * (2 * 20 - 5)
    assert (
        unlimited_flops - windowed_flops == 6 * model.num_layers * model.hidden_size * squares * 6
    )
    speed = Speedometer.of(run, padded_vocab_size=128, peak_flops=None)
    assert 6 * speed.flops_per_sample == windowed_flops
    # A document as long as the sample costs as much as the sample.
    assert speed.flops(samples=6, squares=6 * 5 * (2 * 20 - 5)) == windowed_flops
    two_rows = dataclasses.replace(batch(True))
    assert squared_lengths(two_rows, {5: 1.0}) == 5 * (24 - 5) + 5 * 5 + 5 * (14 - 5)
    assert squared_lengths(two_rows) == 144 + 25 + 49


def test_flops_count_the_window_of_each_layer():
    alternating = resolve(small_config("--window-size 5 --window-attn-skip-freq 1,0"), 1)
    model = gpt_config(alternating.config, 128)
    assert window_shares(model) == {5: 0.5, None: 0.5}
    shape = {"vocab_size": 128, "seq_length": 20, "samples": 6}
    full, windowed = (
        training_flops(gpt_config(resolve(small_config(flags), 1).config, 128), **shape)
        for flags in ("", "--window-size 5")
    )
    assert training_flops(model, **shape) == (full + windowed) / 2
