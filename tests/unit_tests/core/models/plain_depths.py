# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction written out plainly in fp64, one document at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn import functional

from tests.parity.plain_gpt import PlainGPT, Weights


class PlainMTP(PlainGPT):
    """A plain GPT with MTP layers."""

    def hidden(self, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [b, s, h]."""
        x = weights["embedding.weight"][tokens]
        for layer in range(self.layers):
            x = self.layer(weights, "decoder.blocks", 2 * layer, x)
        return self.norm_of(weights, "decoder.final_norm", x)

    def layer(self, weights: Weights, name: str, block: int, x: torch.Tensor) -> torch.Tensor:
        """Return x [b, s, h] after the blocks `block` and `block` + 1."""
        x = x + self.attention(weights, f"{name}.{block}", x)
        return x + self.mlp(weights, f"{name}.{block + 1}", x)

    def mtp_layer(
        self, weights: Weights, k: int, previous: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states of MTP layer k from the previous ones and tokens k + 1 ahead."""
        name = f"mtp.{k}"
        embedded = weights["embedding.weight"][tokens]
        joined = torch.cat(
            [
                self.norm_of(weights, f"{name}.embedding_norm", embedded),
                self.norm_of(weights, f"{name}.hidden_norm", previous),
            ],
            dim=-1,
        )
        x = joined @ weights[f"{name}.projection.weight"].T
        x = self.layer(weights, f"{name}.decoder.blocks", 0, x)
        return self.norm_of(weights, f"{name}.decoder.final_norm", x)

    def losses(
        self,
        weights: Weights,
        text: torch.Tensor,
        token_weights: torch.Tensor,
        *,
        num_mtp_layers: int,
        document_bounds: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Return the main loss and the loss of each MTP layer, summed over tokens.

        Args:
            text: int64 [b, s + 1], tokens and labels together.
            token_weights: [b, s].
            document_bounds: for each row, the bounds 0, ..., s of its documents.
        """
        head = weights["embedding.weight" if self.tied else "head.weight"]
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(1 + num_mtp_layers)]
        for row, bounds in enumerate(document_bounds):
            for start, end in itertools.pairwise(bounds):
                hidden = self.hidden(weights, text[None, row, start:end])
                sums[0] = sums[0] + self._sum(head, hidden, text, token_weights, row, start + 1)
                for k in range(min(num_mtp_layers, end - start - 1)):
                    tokens = text[None, row, start + k + 1 : end]
                    hidden = self.mtp_layer(weights, k, hidden[:, : tokens.shape[1]], tokens)
                    mtp_loss = self._sum(head, hidden, text, token_weights, row, start + k + 2)
                    sums[1 + k] = sums[1 + k] + mtp_loss
        return sums

    @staticmethod
    def _sum(
        head: torch.Tensor,
        hidden: torch.Tensor,
        text: torch.Tensor,
        token_weights: torch.Tensor,
        row: int,
        start: int,
    ) -> torch.Tensor:
        """Return the summed loss of hidden [1, n, h] for labels text[row, start : start + n]."""
        labels = text[row, start : start + hidden.shape[1]]
        nll = functional.cross_entropy(hidden[0] @ head.T, labels, reduction="none")
        return (nll * token_weights[row, start - 1 : start - 1 + len(nll)].double()).sum()
