# SPDX-License-Identifier: Apache-2.0
"""VocabParallelHead: hidden states to logits or to the loss, over a vocabulary cut by tp."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.comm.collectives import all_gather
from megatron.core.comm.conjugates import copy_to_group, gather_from_group
from megatron.core.initialize import InitSpec
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import check_ids
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import WeightSharding


class VocabParallelHead(nn.Module):
    """Project to the vocabulary. Declared with the embedding's sharding it is tied to it."""

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

    def _enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden [s, b, h] whole on every rank; its gradient comes back partial(tp)."""
        if self.region.scatters:
            return gather_from_group(hidden, self.region.group, partial_gradient=True)
        return copy_to_group(hidden, self.region.group)

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of token_weights · nll, nll [s, b]).

        Args:
            hidden: [s, b, h] ([s/tp, b, h] under sequence parallelism).
            targets: int64 [s, b].
            token_weights: fp32 [s, b].

        Raises:
            ValueError: targets or weights of another shape, or a target that is no id.
        """
        hidden = self._enter(hidden)
        for what, tensor in (("labels", targets), ("token_weights", token_weights)):
            if tensor.shape != hidden.shape[:-1]:
                raise ValueError(
                    f"{what} {list(tensor.t().shape)} for {list(hidden.shape[1::-1])} tokens: give "
                    "one for each token, [b, s] to the model"
                )
        check_ids(targets, self.vocab_size, "label")
        loss, nll = vocab_parallel_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.weight,
            targets.reshape(-1),
            token_weights.reshape(-1),
            group=self.region.group,
            vocab_size=self.vocab_size,
        )
        return loss, nll.view(targets.shape)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return local logits [s, b, V/tp], padding columns included."""
        return self.weight.linear(self._enter(hidden))

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather local logits [s, b, V/tp] to fp32 [s, b, V] on every rank, without padding
        columns."""
        group = self.region.group
        parts = all_gather(logits.unsqueeze(0), group)  # [tp, s, b, V/tp]
        whole = parts.permute(1, 2, 0, 3).flatten(2)  # [s, b, V + padding]
        return whole[..., : self.vocab_size].float()
