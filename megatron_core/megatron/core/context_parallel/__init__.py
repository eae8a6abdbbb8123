# SPDX-License-Identifier: Apache-2.0
"""How the sequences of a microbatch lie over ranks."""

from megatron.core.context_parallel.cut import SequenceCut
from megatron.core.context_parallel.layout import SequenceLayout

__all__ = ["SequenceCut", "SequenceLayout"]
