# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction written out plainly in fp64, document by document: each one alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn import functional

from tests.parity.plain_gpt import PlainGPT, Weights


class PlainDepths(PlainGPT):
    """A plain GPT with depths behind it."""

    def hidden(self, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [b, s, h]."""
        x = weights["embedding.weight"][tokens]
        for layer in range(self.layers):
            x = self.layer(weights, "decoder.blocks", 2 * layer, x)
        return self.norm_of(weights, "decoder.final_norm", x)

    def layer(self, weights: Weights, name: str, first: int, x: torch.Tensor) -> torch.Tensor:
        """Return x [b, s, h] behind the blocks `first` and `first` + 1."""
        x = x + self.attention(weights, f"{name}.{first}", x)
        return x + self.mlp(weights, f"{name}.{first + 1}", x)

    def depth(
        self, weights: Weights, k: int, before: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states of depth k from those before it and the tokens k + 1 ahead."""
        name = f"mtp.{k}"
        embedded = weights["embedding.weight"][tokens]
        both = torch.cat(
            [
                self.norm_of(weights, f"{name}.embedding_norm", embedded),
                self.norm_of(weights, f"{name}.hidden_norm", before),
            ],
            dim=-1,
        )
        x = both @ weights[f"{name}.projection.weight"].T
        x = self.layer(weights, f"{name}.decoder.blocks", 0, x)
        return self.norm_of(weights, f"{name}.decoder.final_norm", x)

    def losses(
        self,
        weights: Weights,
        text: torch.Tensor,
        token_weights: torch.Tensor,
        *,
        depths: int,
        borders: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Return the main loss and the loss of each depth, sums over tokens.

        Args:
            text: int64 [b, s + 1], tokens and labels in one.
            token_weights: [b, s].
            borders: of each row's documents, 0, ..., s.
        """
        head = weights["embedding.weight" if self.tied else "head.weight"]
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(1 + depths)]
        for row, ends in enumerate(borders):
            for first, last in itertools.pairwise(ends):
                hidden = self.hidden(weights, text[None, row, first:last])
                sums[0] = sums[0] + self._sum(head, hidden, text, token_weights, row, first + 1)
                for k in range(min(depths, last - first - 1)):
                    tokens = text[None, row, first + k + 1 : last]
                    hidden = self.depth(weights, k, hidden[:, : tokens.shape[1]], tokens)
                    found = self._sum(head, hidden, text, token_weights, row, first + k + 2)
                    sums[1 + k] = sums[1 + k] + found
        return sums

    @staticmethod
    def _sum(
        head: torch.Tensor,
        hidden: torch.Tensor,
        text: torch.Tensor,
        token_weights: torch.Tensor,
        row: int,
        first: int,
    ) -> torch.Tensor:
        """Return the loss of hidden [1, n, h], whose labels are text[row, first : first + n]."""
        labels = text[row, first : first + hidden.shape[1]]
        nll = functional.cross_entropy(hidden[0] @ head.T, labels, reduction="none")
        return (nll * token_weights[row, first - 1 : first - 1 + len(nll)].double()).sum()
