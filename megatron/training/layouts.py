# SPDX-License-Identifier: Apache-2.0
"""Layouts: which tokens of its samples' rows this rank has, and where documents meet in them.

Made on the host, where batches are read: all layers of a microbatch then share one, and only the
tokens that this rank works on are copied to its device.
"""

from __future__ import annotations

import torch

from megatron.core.context_parallel import SequenceCut, SequenceLayout
from megatron.core.context_parallel.blockwise import worth_blocks
from megatron.core.context_parallel.index_maps import documents_of
from megatron.core.datasets.samplers import GPTBatch
from megatron.core.models.gpt import GPTConfig
from megatron.core.process_groups import Group
from megatron.training.config.layer_pattern import is_recurrent
from megatron.training.config.resolve import Run
from megatron.training.packed_cuts import PackedCuts, packed_cuts
from megatron.training.run_groups import RunGroups


class Layouts:
    """Makes the layouts of a run's batches.

    Args:
        context: the ranks that share the tokens of a row.
        device: where layers work.
        block_heads: query heads of a rank, where documents of whole rows may be attended one by
            one; None masks them.
        recurrent: whether layers carry states along documents, so that they must know where these
            begin.
        cuts: choose how packed rows are cut; None cuts each as one.
    """

    def __init__(
        self,
        context: Group,
        device: torch.device,
        *,
        block_heads: int | None = None,
        recurrent: bool = False,
        cuts: PackedCuts | None = None,
    ) -> None:
        self._context, self._device, self._block_heads = context, device, block_heads
        self._recurrent, self._cuts = recurrent, cuts
        self._dense: dict[tuple[int, int], SequenceLayout] = {}

    def of(self, batch: GPTBatch) -> SequenceLayout | None:
        """Return the layout of a batch, without samples; None where rows are whole and hold one
        document each, or are masked by document ids, and some of them count.

        Raises:
            ValueError: rows that do not divide over the ranks.
        """
        found = self._of_rows(batch)
        if not batch.filler:
            return found
        return (self._masked(batch) if found is None else found).as_filler()

    def _of_rows(self, batch: GPTBatch) -> SequenceLayout | None:
        rows, length = batch.loss_mask.shape
        masks = self._context.size == 1 and not self._part_by_part(batch)
        if masks and not self._recurrent:
            return None
        if batch.positions is None and batch.document_ids is None:
            if (rows, length) not in self._dense:
                self._dense[rows, length] = self._make(batch)
            return self._dense[rows, length]
        return self._make(batch, masks_by_ids=masks)

    def _masked(self, batch: GPTBatch) -> SequenceLayout:
        """Return the layout of whole rows that are masked by document ids, if any."""
        given = {"positions": batch.positions, "document_ids": batch.document_ids}
        moved = {
            name: None if rows is None else rows.to(self._device) for name, rows in given.items()
        }
        return SequenceLayout.packed(batch.loss_mask.shape[1], device=self._device, **moved)

    def _make(self, batch: GPTBatch, *, masks_by_ids: bool = False) -> SequenceLayout:
        rows, length = batch.loss_mask.shape
        if self._cuts is not None and batch.document_ids is not None:
            cut = self._cuts.of(documents_of(batch.document_ids.numpy()))
            if cut is not None:
                return self._apart(batch, cut)
        return SequenceLayout.make(
            SequenceCut.of(length, self._context.size),
            self._context.rank,
            rows=rows,
            positions=batch.positions,
            document_ids=batch.document_ids,
            device=self._device,
            masks_by_ids=masks_by_ids,
        )

    def _apart(self, batch: GPTBatch, cut: SequenceCut) -> SequenceLayout:
        """Return the layout of one row that holds all samples, each document cut apart."""
        ids, positions = batch.document_ids, batch.positions
        assert ids is not None
        samples, length = ids.shape
        if positions is None:
            positions = torch.arange(length).expand(samples, -1)
        before = (ids[:, -1] + 1).cumsum(0).roll(1)  # documents of earlier samples
        before[0] = 0
        return SequenceLayout.make(
            cut,
            self._context.rank,
            rows=1,
            positions=positions.reshape(1, -1),
            document_ids=(ids + before.unsqueeze(1)).view(1, -1),
            device=self._device,
        ).holding_samples(length)

    def _part_by_part(self, batch: GPTBatch) -> bool:
        """Return whether to attend to the documents of whole rows one by one."""
        if batch.document_ids is None or self._block_heads is None:
            return False
        documents = int((batch.document_ids[:, -1] - batch.document_ids[:, 0] + 1).sum())
        rows, length = batch.loss_mask.shape
        return worth_blocks(documents, rows=rows, length=length, heads=self._block_heads)


def layouts_of(run: Run, place: RunGroups, model: GPTConfig) -> Layouts:
    """Return what makes the layouts of a run."""
    parallel = run.config.parallel
    # On a GPU one call masks documents of any length, and a kernel asked for by name is one call.
    masks = place.device.type != "cpu" or parallel.attention_backend != "auto"
    heads = (run.config.model.num_attention_heads or 0) // parallel.tensor_model_parallel_size
    return Layouts(
        place.groups["cp"],
        place.device,
        block_heads=None if masks or not heads else heads,
        recurrent=is_recurrent(run.config),
        cuts=packed_cuts(run, place, model),
    )
