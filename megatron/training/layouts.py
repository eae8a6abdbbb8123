# SPDX-License-Identifier: Apache-2.0
"""Layouts: which tokens of its samples' rows a rank processes, and the document boundaries.

A layout is built on the host, where batches are read: all layers of a microbatch share one, and
only the tokens that this rank processes are copied to its device.

How packed rows are split over context-parallel ranks (`--context-parallel-cut`) is a function of a
microbatch's documents and of the model's shape alone, so that all ranks that share the microbatch
choose the same split. Only if experts gather the tokens of ranks with other documents do these
ranks agree on the split, and on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch

from megatron.core.comm import all_reduce
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.attention import ALL_TO_ALL, choose
from megatron.core.context_parallel.blockwise import PAIRS_WORTH_A_BLOCK, worth_blocks
from megatron.core.context_parallel.sequence_sharding import (
    DOCUMENTS,
    ROW,
    AttentionWork,
    Costs,
    Documents,
    attention_work,
    documents_of,
    joined_documents,
    shard_documents,
)
from megatron.core.datasets.samplers import GPTBatch
from megatron.core.device import pin
from megatron.core.models.gpt import GPTConfig
from megatron.core.moe.dispatch import choose_dispatcher
from megatron.core.process_groups import Group, ProcessGroupCollection
from megatron.training.config import Config
from megatron.training.config.layer_pattern_options import is_recurrent
from megatron.training.config.resolve import ResolvedRun
from megatron.training.core_configs import attention_shape
from megatron.training.distributed_context import DistributedContext
from megatron.training.monitoring.flops import flops_per_square, product_weights, window_shares

#: Returns the elementwise maximum of the numbers over ranks with other documents.
Agree = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class Choice:
    """The split of one microbatch.

    Args:
        row, by_document: attention work of the ranks if each row is split as one sequence, and if
            documents are split separately.
        cut: the split of one row that concatenates all rows; None splits each row as one sequence.
    """

    row: AttentionWork
    by_document: AttentionWork
    cut: SequenceSharding | None


class PackedCuts:
    """Chooses the split of each microbatch of packed rows.

    Args:
        kind: "row", "documents" or "auto", which takes the split with the faster slowest rank.
        size: context parallel size.
        costs: FLOPs of the model per token, token pair and sub-sequence.
        window: attention window, in tokens; None is unlimited, or differs between the blocks.
        multiple: the number of tokens per rank is a multiple of this.
        by_heads: attention is split by heads: each rank has all token pairs of some heads.
        agree: maximum over ranks that gather each other's tokens and have other documents; None
            without such ranks.
    """

    def __init__(
        self,
        kind: str,
        size: int,
        *,
        costs: Costs,
        window: int | None = None,
        multiple: int = 1,
        by_heads: bool = False,
        agree: Agree | None = None,
    ) -> None:
        self.kind, self.size, self.costs = kind, size, costs
        self._seen = {"window": window, "by_heads": by_heads}
        self._multiple, self._agree = multiple, agree

    def of(self, documents: Documents) -> SequenceSharding | None:
        """Return the split of one row that concatenates all rows, document by document; None splits
        each row as one sequence. Ranks that must agree call it together.

        Args:
            documents: document boundaries of each row of the microbatch.
        """
        if self.kind == ROW:
            return None
        if self._agree is None:
            return self.choice(documents).cut
        by_document = shard_documents(documents, self.size, multiple=self._multiple)
        costs = self._costs(*self._attention_work(documents, by_document))
        *costs, tokens = self._agree([*costs, by_document.padded[-1]])
        if not costs[1] < costs[0]:
            return None
        return shard_documents(
            documents, self.size, multiple=self._multiple, at_least=round(tokens)
        )

    def choice(self, documents: Documents) -> Choice:
        """Return the split that this rank would choose on its own, and the work of both splits."""
        by_document = shard_documents(documents, self.size, multiple=self._multiple)
        works = self._attention_work(documents, by_document)
        row_cost, by_document_cost = self._costs(*works)
        return Choice(*works, by_document if by_document_cost < row_cost else None)

    def _attention_work(
        self, documents: Documents, by_document: SequenceSharding
    ) -> tuple[AttentionWork, AttentionWork]:
        row = SequenceSharding.of(documents[0][-1], self.size)
        return (
            attention_work(row, documents, **self._seen),
            attention_work(by_document, [joined_documents(documents)], **self._seen),
        )

    def _costs(self, row: AttentionWork, by_document: AttentionWork) -> tuple[float, float]:
        """Return the costs of both splits; a split that the options exclude costs infinity."""
        return (
            inf if self.kind == DOCUMENTS else row.cost(self.costs),
            inf if self.kind == ROW else by_document.cost(self.costs),
        )


def packed_cuts(
    run: ResolvedRun, context: DistributedContext, model: GPTConfig
) -> PackedCuts | None:
    """Return the object that chooses the splits of a run's rows; None if rows are not split over
    ranks, contain one document each, or the model has no attention."""
    parallel, data = run.config.parallel, run.config.data
    packed = data.sft or data.reset_attention_mask
    if parallel.context_parallel_size == 1 or not packed or model.attention is None:
        return None
    cp, shape = parallel.context_parallel_size, attention_shape(run)
    assert shape is not None
    windows = window_shares(model)
    engine = choose(parallel.cp_comm_type, shape, cp).engine  # independent of the number of tokens
    return PackedCuts(
        parallel.context_parallel_cut,
        cp,
        costs=costs_of(model, parallel.tensor_model_parallel_size),
        window=next(iter(windows)) if len(windows) == 1 else None,
        multiple=parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1,
        by_heads=engine == ALL_TO_ALL,
        agree=agreement(
            context.groups,
            model,
            parallel.moe_token_dispatcher_type,
            context.device,
            equal=parallel.moe_expert_rank_capacity_factor is not None,
        ),
    )


def costs_of(model: GPTConfig, tp: int) -> Costs:
    """Return the cost of a token, a token pair and a sub-sequence on each of tp ranks, in FLOPs.

    A causal square of n^2 has n (n + 1) / 2 pairs, half of its area; hence the factor of 2.
    """
    pair, heads = 2.0 * flops_per_square(model), 1
    if model.attention is not None:
        heads = max(1, model.attention.num_attention_heads // tp)
    return Costs(
        token=6.0 * product_weights(model, model.vocab_size) / tp,
        pair=pair / tp,
        sub_sequence=pair / tp / heads * PAIRS_WORTH_A_BLOCK,
    )


def agreement(
    groups: ProcessGroupCollection,
    model: GPTConfig,
    dispatcher: str,
    device: torch.device,
    *,
    equal: bool = False,
) -> Agree | None:
    """Return the maximum over ranks that gather each other's tokens and have other documents; these
    ranks must process equally many tokens. None if experts gather no tokens of such ranks.

    Args:
        dispatcher: the configured token dispatcher, "auto" included.
        device: device of the reduction.
        equal: ranks exchange blocks of equal size with any dispatcher.
    """
    group, grid = groups["etp_ep"], groups.grid
    coordinates = (grid.coordinates(rank) for rank in group.ranks)
    if (
        model.moe is None
        or len({(position["gtp"], position["dp"]) for position in coordinates}) == 1
    ):
        return None
    chosen = choose_dispatcher(dispatcher, topk=model.moe.router.topk, ep=grid.ep)
    if chosen != "allgather" and not equal:
        return None

    def agree(numbers: Sequence[float]) -> Sequence[float]:
        local_numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        return all_reduce(local_numbers, group, op="max").tolist()

    return agree


class Layouts:
    """Builds the layouts of a run's batches.

    Args:
        context: the context-parallel group.
        device: device of the layers.
        block_heads: query heads per rank if documents of whole rows may be attended to one by one;
            None masks them.
        bounds: whether layers need document boundaries, as recurrences, TransformerEngine's
            attention and torch's fused attention do; masks need document ids only.
        cuts: chooses how packed rows are split; None splits each row as one sequence.
    """

    def __init__(
        self,
        context: Group,
        device: torch.device,
        *,
        block_heads: int | None = None,
        bounds: bool = False,
        cuts: PackedCuts | None = None,
    ) -> None:
        self._context, self._device, self._block_heads = context, device, block_heads
        self._bounds, self._cuts = bounds, cuts
        self._dense: dict[tuple[int, ...], SequenceLayout] = {}

    def of(self, batch: GPTBatch) -> SequenceLayout:
        """Return the layout of a batch, without sample numbers.

        Rows of one document share one layout per shape, so that index maps are computed and copied
        to the device once.

        Raises:
            ValueError: the rows cannot be divided over the ranks.
        """
        dense = batch.positions is None and batch.document_ids is None
        shape = batch.loss_mask.shape
        layout = self._dense.get(shape) if dense else None
        if layout is None:
            layout = self._of_rows(batch)
        if dense:
            self._dense[shape] = layout
        if batch.padding is None:
            return layout
        padding = layout.local(batch.padding, fill=True).t().contiguous()  # [s/cp, b]
        return layout.with_padding(self._to_device(padding))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return pin(tensor, self._device).to(self._device, non_blocking=True)

    def _of_rows(self, batch: GPTBatch) -> SequenceLayout:
        masks = self._context.size == 1 and not self._attends_by_document(batch)
        if not masks or self._bounds:
            return self._layout(batch, masks_by_ids=masks)
        row_tensors = {"positions": batch.positions, "document_ids": batch.document_ids}
        moved = {name: None if x is None else self._to_device(x) for name, x in row_tensors.items()}
        return SequenceLayout.of_rows(batch.loss_mask.shape[1], device=self._device, **moved)

    def _layout(self, batch: GPTBatch, *, masks_by_ids: bool = False) -> SequenceLayout:
        rows, length = batch.loss_mask.shape
        if self._cuts is not None and batch.document_ids is not None:
            cut = self._cuts.of(documents_of(batch.document_ids.numpy()))
            if cut is not None:
                return self._split_documents(batch, cut)
        return SequenceLayout.make(
            SequenceSharding.of(length, self._context.size),
            self._context.rank,
            rows=rows,
            positions=batch.positions,
            document_ids=batch.document_ids,
            device=self._device,
            masks_by_ids=masks_by_ids,
        )

    def _split_documents(self, batch: GPTBatch, cut: SequenceSharding) -> SequenceLayout:
        """Return the layout of one row that concatenates all samples, split document by
        document."""
        ids, positions = batch.document_ids, batch.positions
        assert ids is not None
        samples, length = ids.shape
        if positions is None:
            positions = torch.arange(length).expand(samples, -1)
        num_earlier = (ids[:, -1] + 1).cumsum(0).roll(1)  # documents of earlier samples
        num_earlier[0] = 0
        return SequenceLayout.make(
            cut,
            self._context.rank,
            rows=1,
            positions=positions.reshape(1, -1),
            document_ids=(ids + num_earlier.unsqueeze(1)).view(1, -1),
            device=self._device,
        ).holding_samples(length)

    def _attends_by_document(self, batch: GPTBatch) -> bool:
        """Return whether to attend to the documents of whole rows one by one."""
        if batch.document_ids is None or self._block_heads is None:
            return False
        documents = int((batch.document_ids[:, -1] - batch.document_ids[:, 0] + 1).sum())
        rows, length = batch.loss_mask.shape
        return worth_blocks(documents, rows=rows, length=length, heads=self._block_heads)


def needs_bounds(config: Config, device: torch.device) -> bool:
    """Return whether a run's layers need document boundaries, not only document ids."""
    parallel = config.parallel
    # A CUDA graph replays the captured document boundaries; with document ids alone it handles any
    # documents.
    eager = config.execution.cuda_graph_impl == "none"
    fused = device.type == "cuda" and parallel.attention_backend == "auto" and eager
    return is_recurrent(config) or parallel.transformer_impl != "local" or fused


def layouts_of(run: ResolvedRun, context: DistributedContext, model: GPTConfig) -> Layouts:
    """Return the object that builds the layouts of a run."""
    parallel = run.config.parallel
    # One masked kernel call handles documents of any length on a GPU and in explicitly chosen
    # kernels.
    masks = context.device.type != "cpu" or parallel.attention_backend != "auto"
    heads = (run.config.model.num_attention_heads or 0) // parallel.tensor_model_parallel_size
    return Layouts(
        context.groups["cp"],
        context.device,
        block_heads=None if masks or not heads else heads,
        bounds=needs_bounds(run.config, context.device),
        cuts=packed_cuts(run, context, model),
    )
