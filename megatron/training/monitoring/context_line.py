# SPDX-License-Identifier: Apache-2.0
"""The lines of a run's log on context parallelism: how attention and recurrences meet the tokens of
other ranks, how packed rows are cut, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron.core.context_parallel.balance import Work
from megatron.core.context_parallel.choice import explain
from megatron.core.context_parallel.index_maps import documents_of
from megatron.core.datasets.samplers import GPTBatch
from megatron.core.ssm.choice import explain as explain_linear
from megatron.core.ssm.choice import linear_shape
from megatron.training.config import Config
from megatron.training.config.model_table import recurrent_shapes
from megatron.training.config.resolve import Run
from megatron.training.gpt_options import attention_shape, weight_dtype
from megatron.training.packed_cuts import PackedCuts


def context_words(config: Config) -> str:
    """Return context parallelism for a line about all kinds; nothing for one rank."""
    cp = config.parallel.context_parallel_size
    return f"context parallel {cp}, " if cp > 1 else ""


def context_line(run: Run) -> str | None:
    """Return how attention meets the tokens of other ranks and why; None where there are none."""
    parallel, training = run.config.parallel, run.config.training
    cp, shape = parallel.context_parallel_size, attention_shape(run)
    if cp == 1 or shape is None:
        return None
    return (
        f"{explain(parallel.cp_comm_type, shape, cp)}; each rank has {shape.tokens:,} of the "
        f"{training.seq_length:,} tokens of a sample"
    )


def linear_lines(run: Run) -> list[str]:
    """Return how each kind of recurrent block meets the tokens of other ranks and why; none where
    there are no others."""
    parallel, training = run.config.parallel, run.config.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if cp == 1:
        return []
    tokens = {
        "tokens": training.seq_length // cp,
        "rows": training.micro_batch_size,
        "element_bytes": weight_dtype(run.config).itemsize,
    }
    found = []
    for name, config in recurrent_shapes(run.config).items():
        shape = replace(linear_shape(config, tp), **tokens)
        found.append(f"{name}: {explain_linear(parallel.linear_cp_mode, shape, cp)}")
    return found


def cut_line(cuts: PackedCuts, batches: Iterable[GPTBatch]) -> str | None:
    """Return how evenly attention is shared out by either cut of packed rows, and which is chosen;
    None without any.

    Args:
        batches: some of the run's, the first ones.
    """
    given = (batch.document_ids for batch in batches)
    found = [cuts.choice(documents_of(ids.numpy())) for ids in given if ids is not None]
    if not found:
        return None
    apart, number = [choice.apart for choice in found], len(found)
    padding = sum(work.padding for work in apart)
    tokens = sum(work.tokens for work in apart) * cuts.size - padding
    count = sum(choice.cut is not None for choice in found)
    which = f"{count} of them are cut by documents"
    if count in (0, number):
        which = "documents" if count else "row"
    reason = "auto" if cuts.kind == "auto" else "by --context-parallel-cut"
    return (
        f"context parallel cut: in the first {number} microbatches the slowest rank has "
        f"{_imbalance([choice.row for choice in found]):.2f} x the mean attention pairs by row, "
        f"{_imbalance(apart):.2f} x by documents, with {padding / tokens:.1%} padding; "
        f"{reason}: {which}"
    )


def _imbalance(works: list[Work]) -> float:
    """Return the pairs of the slowest rank of each microbatch over the mean; 1 is even."""
    mean = sum(sum(work.pairs) / len(work.pairs) for work in works)
    return sum(max(work.pairs) for work in works) / max(mean, 1.0)
