# SPDX-License-Identifier: Apache-2.0
"""VocabParallelEmbedding: token embeddings cut by vocabulary rows, any vocabulary size."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from megatron.core.comm.conjugates import reduce_from_group, reduce_scatter_to_group
from megatron.core.initialize import InitSpec
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import Cut, WeightSharding


def vocabulary_sharding(
    name: str,
    vocab_size: int,
    hidden_size: int,
    *,
    row_multiple: int = 1,
    stages: tuple[int, ...] = (),
) -> WeightSharding:
    """Describe a [V, h] weight cut by rows over tp, each rank's rows padded to a multiple.

    Args:
        stages: the pipeline stages that own it, if more than the one that declares it.
    """
    return WeightSharding.of(
        name,
        (vocab_size, hidden_size),
        Cut(axis="tp", dim=0),
        row_multiple=row_multiple,
        stages=stages,
    )


#: What to do about an id that is none.
_FIX = MappingProxyType(
    {
        "token": "use the tokenizer of this model, or a model of a larger vocabulary",
        "label": "leave a token out by its weight 0, with any id of the vocabulary as its label",
    }
)


def check_ids(ids: torch.Tensor, vocab_size: int, what: Literal["token", "label"]) -> None:
    """Raise ValueError for an id that is not in the vocabulary; ids on a GPU are not looked at.

    Args:
        ids: int64, of any shape.
        what: they are, for the message.
    """
    if ids.is_floating_point():
        raise ValueError(f"{what} ids are {ids.dtype}: give integers, such as {what}s.long()")
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = ids.aminmax()
    if low < 0 or high >= vocab_size:
        wrong = int(low if low < 0 else high)
        raise ValueError(
            f"{what} id {wrong} is not in the vocabulary of {vocab_size} ids, 0 to "
            f"{vocab_size - 1}: {_FIX[what]}"
        )


class VocabParallelEmbedding(nn.Module):
    """Look up token ids in a [V, h] table of which each rank holds V/tp rows (padded).

    Raises:
        ValueError: a token id outside [0, V), on a CPU; a GPU is not waited for to look.
    """

    def __init__(
        self,
        sharding: WeightSharding,
        *,
        store: WeightStore,
        region: TensorParallelRegion,
        init: InitSpec,
    ) -> None:
        super().__init__()
        self.region = region
        self.vocab_size = sharding.segments[0].shape[0]
        self.weight = store.declare(sharding, init)
        self.first = region.group.rank * self.weight.shape[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h] ([s/tp, b, h] under sequence parallelism) from ids int64 [s, b]."""
        check_ids(ids, self.vocab_size, "token")
        if self.region.group.size == 1:
            return self.weight.embedding(ids)
        local = ids - self.first
        valid = (local >= 0) & (local < self.weight.shape[0])
        rows = self.weight.embedding(local.where(valid, 0), valid)  # [s, b, h] partial(tp)
        if self.region.scatters:
            return reduce_scatter_to_group(rows, self.region.group)  # [s/tp, b, h]
        return reduce_from_group(rows, self.region.group)
