# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: how the sequences of a microbatch are sharded over ranks.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.context_parallel.attention import context_attention as context_attention
    from megatron.core.context_parallel.attention import context_problems as context_problems
    from megatron.core.context_parallel.layout import ContextParallel as ContextParallel
    from megatron.core.context_parallel.layout import SequenceLayout as SequenceLayout
    from megatron.core.context_parallel.packed_tokens import PackedTokens as PackedTokens
    from megatron.core.context_parallel.sequence_sharding import (
        SequenceSharding as SequenceSharding,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
