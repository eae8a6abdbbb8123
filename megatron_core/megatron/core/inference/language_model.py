# SPDX-License-Identifier: Apache-2.0
"""What generation asks of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.batch_cache import BatchCache


class Head(Protocol):
    """Hidden states to logits; `megatron.core.tensor_parallel.VocabParallelHead` is one."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden states [s, b, h] to this rank's logits [s, b, V/tp]."""
        ...

    def whole(self, logits: Tensor) -> Tensor:
        """Gather them to fp32 [s, b, V], the same on every rank, without padding columns."""
        ...


class LanguageModel(Protocol):
    """What the engine asks of a model; `megatron.core.models.gpt.GPTModel` is one."""

    head: Head

    def __call__(self, tokens: Tensor, *, layout: SequenceLayout, cache: BatchCache) -> Tensor:
        """Map tokens [b, s], which follow those in the cache, to hidden states [s, b, h].

        `layout` has positions [s, b] and document ids [s_k, b], those of the cached tokens too.
        """
        ...
