# SPDX-License-Identifier: Apache-2.0
"""Share: the rows of a microbatch that a rank sends to experts; every row is one rank's.

With sequence parallelism a rank has other rows than its tp peers already. Without it all have the
same ones: each then takes its part of them, and the results are gathered. Rows that do not divide
are filled up with padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.comm.conjugates import gather_from_group, scatter_to_group
from megatron.core.context_parallel import SequenceLayout
from megatron.core.tensor_parallel import TensorParallelRegion


class Share:
    """One rank's rows.

    Args:
        hidden: [s, b, h] ([s/tp, b, h] under sequence parallelism).
        layout: of the microbatch.
        region: the tp group.

    Attributes:
        batch: b.
        real: bool [t], False for padding; None where there is none.
        filler: whether no row counts for anything.
    """

    def __init__(
        self, hidden: torch.Tensor, layout: SequenceLayout, *, region: TensorParallelRegion
    ) -> None:
        self.shape, self.batch = hidden.shape, hidden.shape[1]
        self._layout, self._region, self.filler = layout, region, layout.filler
        self._divides = region.group.size > 1 and not region.scatters
        present = hidden.shape[0] * hidden.shape[1]
        parts = region.group.size if self._divides else 1
        self._missing = -present % parts
        self.count = (present + self._missing) // parts  # t
        self._device = hidden.device
        self.real = self._real()

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows [t, h]."""
        flat = hidden.flatten(0, 1)
        if not self._divides:
            return flat
        if self._missing:
            flat = F.pad(flat, (0, 0, 0, self._missing))
        return scatter_to_group(flat, self._region.group)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h], as `hidden` was, from every rank's rows [t, h]."""
        if self._divides:
            rows = gather_from_group(rows, self._region.group)
            rows = rows[: len(rows) - self._missing]
        return rows.view(self.shape)

    @property
    def samples(self) -> torch.Tensor | None:
        """Each row's sample, int64 [t]; None outside training."""
        samples = self._layout.sample_ids
        return None if samples is None else samples[self.sequences]

    @property
    def sequences(self) -> torch.Tensor:
        """Each row's sequence 0 … `num_sequences` - 1, int64 [t]."""
        samples = self._layout.sample_numbers
        if samples is None:
            return self._numbers % self.batch
        return samples[(self._numbers // self.batch).clamp(max=len(samples) - 1)]

    @property
    def num_sequences(self) -> int:
        """How many sequences the microbatch has."""
        layout = self._layout
        if layout.sample_length is None or layout.cut is None:
            return self.batch
        return layout.cut.length // layout.sample_length

    @property
    def counted(self) -> int:
        """Rows of a rank without padding of sequences, on average over the ranks of cp."""
        cut = self._layout.cut
        if cut is None or not cut.is_padded:
            return self.count
        return round(self.count * cut.length / cut.padded[-1])

    @property
    def places(self) -> torch.Tensor:
        """Each row's place in its sequence, int64 [t]; -1 is padding of the sequence."""
        places = self._layout.sample_places  # [s] or [s, b]
        if places.ndim == 2:
            return places.flatten()[self._numbers.clamp(max=places.numel() - 1)]
        return places[(self._numbers // self.batch).clamp(max=len(places) - 1)]

    @property
    def _numbers(self) -> torch.Tensor:
        """Each row's number among the [s, b] of all tp ranks; that of padding may be above."""
        first = self._region.group.rank * self.count
        if self._region.group.size == 1:
            first = 0
        return torch.arange(first, first + self.count, device=self._device)

    def _real(self) -> torch.Tensor | None:
        found = None
        if self._missing:
            found = self._numbers < self.shape[0] * self.batch
        cut = self._layout.cut
        if cut is not None and cut.is_padded:
            inside = self.places >= 0
            found = inside if found is None else found & inside
        return found
