# SPDX-License-Identifier: Apache-2.0
"""How the sequences of a microbatch lie over ranks."""

from megatron.core.context_parallel.sequence_layout import SequenceLayout

__all__ = ["SequenceLayout"]
