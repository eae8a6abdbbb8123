# SPDX-License-Identifier: Apache-2.0
"""A `LanguageModel` of the engine without layers: its hidden states are its logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.transformer import CacheShapes


class StubModel:
    """A model whose most probable next token is a function of the token before it.

    All other tokens are equally probable.

    Args:
        vocab_size: vocabulary size V.
        successor: maps tokens to the tokens after them; None counts up.
        nan_after: token after which all logits are NaN.
        cache_shapes: shapes of a cache that the model does not use.
    """

    max_sequence_length: int | None = None
    device = torch.device("cpu")

    def __init__(
        self,
        vocab_size: int,
        successor: Callable[[Tensor], Tensor] | None = None,
        *,
        nan_after: int | None = None,
        cache_shapes: CacheShapes | None = None,
    ) -> None:
        self.head, self.vocab_size, self.nan_after = self, vocab_size, nan_after
        self.successor = successor or (lambda tokens: (tokens + 1) % vocab_size)
        self.cache_shapes = cache_shapes or CacheShapes()

    def __call__(self, tokens: Tensor, **_: object) -> Tensor:
        """Return the logits [t, 1, V] of tokens [1, t]."""
        logits = 5.0 * torch.nn.functional.one_hot(self.successor(tokens.t()), self.vocab_size)
        if self.nan_after is not None:
            logits[tokens[0] == self.nan_after] = math.nan
        return logits

    def whole(self, logits: Tensor) -> Tensor:
        """Return logits as they are."""
        return logits

    gathered = project = whole

    def weights_replaced(self) -> None:
        """Do nothing: nothing is derived from weights."""
