# SPDX-License-Identifier: Apache-2.0
"""Lines about the batches of a step: sizes, padding, weights in the loss, packed rows."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.context_parallel.sequence_sharding import AttentionWork, documents_of
from megatron.core.datasets.samplers import GPTBatch
from megatron.training.config.resolve import ResolvedRun
from megatron.training.layouts import PackedCuts


def batch_words(run: ResolvedRun) -> str:
    """Return how a step's samples are divided into microbatches, for the run line."""
    division = run.final_division
    num_ranks = division.data_parallel_size
    if division.is_even:
        return (
            f"global batch {division.samples} = {num_ranks} x {division.micro_batch_size} x "
            f"{division.rounds} microbatches"
        )
    return (
        f"global batch {division.samples} in {division.blocks} microbatches of "
        f"{division.micro_batch_size}"
    )


def batch_sizes_line(run: ResolvedRun) -> str | None:
    """Return the sizes of a global batch that ramps up; None if the size is constant."""
    stages = run.batch_sizes.stages
    if len(stages) == 1:
        return None
    sizes = [f"{size} from sample {threshold:,} on" for threshold, size in stages]
    if len(sizes) > 8:
        sizes = [*sizes[:3], f"... {len(sizes) - 4} more", sizes[-1]]
    return f"global batch by samples: {', '.join(sizes)}"


def batch_line(run: ResolvedRun) -> str | None:
    """Return the padding microbatches of each data-parallel rank in a step, and the share of time
    that padding and a smaller last microbatch waste; None if the batch divides evenly."""
    division = run.final_division
    if division.is_even:
        return None
    padding = "no padding microbatch"
    num_ranks = division.data_parallel_size
    ranks = f"{num_ranks} data-parallel rank{'s' if num_ranks > 1 else ''}"
    if division.padding_microbatches:
        padded_from = num_ranks - division.padding_microbatches
        padded = (
            f"rank {padded_from}"
            if division.padding_microbatches == 1
            else f"ranks {padded_from}-{num_ranks - 1}"
        )
        padding = f"1 padding microbatch on {padded}"
    remainder = division.samples % division.micro_batch_size
    remainder_text = f", the last one of {remainder}" if remainder else ""
    return (
        f"uneven batch: {division.blocks} microbatches of {division.micro_batch_size}"
        f"{remainder_text}, on {ranks}, {division.rounds} each, {padding}; "
        f"{100.0 * division.wasted:.1f} % of their time is wasted"
    )


def loss_weight_line(run: ResolvedRun) -> str | None:
    """Return how microbatches of conversations are weighted in the loss, and the flag that weights
    all tokens equally; None if tokens are weighted equally, or without --sft."""
    training, blocks = run.config.training, run.final_division.blocks
    if not run.config.data.sft or training.calculate_per_token_loss or blocks == 1:
        return None
    return (
        f"--sft without --calculate-per-token-loss: each of the {blocks} microbatches of a "
        "step has the same weight, however few of its tokens have a loss, so tokens of short "
        "responses count more; with the flag all tokens with a loss have the same weight"
    )


def cut_line(cuts: PackedCuts, batches: Iterable[GPTBatch]) -> str | None:
    """Return the load balance of attention for both ways to split packed rows, and the selected
    one; None without packed rows.

    Args:
        batches: the first batches of the run.
    """
    document_ids = (batch.document_ids for batch in batches)
    choices = [cuts.choice(documents_of(ids.numpy())) for ids in document_ids if ids is not None]
    if not choices:
        return None
    by_documents, num_batches = [choice.by_document for choice in choices], len(choices)
    padding = sum(work.padding for work in by_documents)
    tokens = sum(work.tokens for work in by_documents) * cuts.size - padding
    num_cut = sum(choice.cut is not None for choice in choices)
    selected = f"{num_cut} of them are split by documents"
    if num_cut in (0, num_batches):
        selected = "documents" if num_cut else "row"
    reason = "auto" if cuts.kind == "auto" else "by --context-parallel-cut"
    return (
        f"context parallel cut: in the first {num_batches} microbatches the slowest rank has "
        f"{_pairs_imbalance([choice.row for choice in choices]):.2f} x the mean attention pairs by "
        f"row, {_pairs_imbalance(by_documents):.2f} x by documents, with "
        f"{padding / tokens:.1%} padding; {reason}: {selected}"
    )


def _pairs_imbalance(work_per_batch: list[AttentionWork]) -> float:
    """Return the attention pairs of the slowest rank over the mean; 1 is perfectly balanced."""
    mean = sum(sum(work.pairs) / len(work.pairs) for work in work_per_batch)
    return sum(max(work.pairs) for work in work_per_batch) / max(mean, 1.0)
