# SPDX-License-Identifier: Apache-2.0
"""Marks: what a kernel asks of one packed token about the sequence that it is in."""

from __future__ import annotations

import numpy as np
import torch

from megatron.core.ops.sequences import Sequences


class Marks:
    """Tables on the device, worked out there from the bounds; the host does not wait.

    Args:
        sequences: of the packed tokens.

    Attributes:
        after: int32 [t], how many tokens of its sequence are before a token.
        number: int32 [t], which sequence it is in.
        bounds: int64 [N+1].
    """

    def __init__(self, sequences: Sequences) -> None:
        self.bounds = sequences.moved(np.asarray(sequences.bounds))
        lengths, device = self.bounds.diff(), self.bounds.device
        number = torch.repeat_interleave(lengths, output_size=sequences.tokens)
        place = torch.arange(sequences.tokens, device=device)
        self.after = (place - self.bounds.index_select(0, number)).int()
        self.number = number.int()

    @staticmethod
    def of(sequences: Sequences) -> Marks:
        """Return those of these sequences, made once."""
        return sequences.made("marks", lambda: Marks(sequences))
