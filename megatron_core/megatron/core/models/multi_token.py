# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

Depth k = 0 … D - 1 predicts token t + k + 2 at position t, where the main model predicts t + 1:

    x_k = projection([norm(embedding(token t + k + 1)), norm(h_(k-1))])
    h_k = final_norm(blocks_k(x_k))         h_(-1) are the main model's final hidden states
    logits = head(h_k)                      embedding and head are the main model's

    training loss = main loss + factor / D · sum over k of the loss of depth k

A depth's token losses have the weights that the main loss gives its tokens, so both are divided by
the same number of tokens, although a depth counts fewer: those whose label is in the row, in the
same document and counted where the main model predicts it.

Only training computes the depths. They lie behind the main model's last layer, in one chunk with
the head, so with several pipeline stages the embedding is a weight of the first and the last one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.core.comm import all_reduce
from megatron.core.context_parallel import SequenceLayout
from megatron.core.models.decoder import Decoder, HiddenDropout
from megatron.core.models.gpt_config import GPTConfig
from megatron.core.tensor_parallel import VocabParallelEmbedding, VocabParallelHead
from megatron.core.transformer import LayerBuild, Norm, Recompute, RopeTable
from megatron.core.weight_sharding import WeightSharding

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True, eq=False)
class Ahead:
    """What the depths of multi-token prediction read and predict, for every token of a microbatch.

    Args:
        tokens: int64 [D, b, s], token t + k + 1 of each row; 0 behind its end. With context
            parallelism those of this rank's t, s is s/cp then.
        labels: int64 [D, b, s], token t + k + 2.
        weights: fp32 [D, b, s], the factor of each token's loss; 0 leaves it out.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def scaled(self, factor: torch.Tensor) -> Ahead:
        """Return it with all weights times a factor."""
        return dataclasses.replace(self, weights=self.weights * factor)


def shifted(
    tokens: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    depths: int,
    document_ids: torch.Tensor | None = None,
) -> Ahead:
    """Return what so many depths read and predict of whole rows.

    Args:
        tokens, labels: int64 [b, s].
        loss_mask: fp32 [b, s], of the main loss.
        depths: D.
        document_ids: int [b, s], not falling along a row; None is one document a row.
    """
    shape = (depths, *tokens.shape)
    found = Ahead(tokens.new_zeros(shape), labels.new_zeros(shape), loss_mask.new_zeros(shape))
    for k in range(min(depths, tokens.shape[1] - 1)):
        near, far = slice(None, -k - 1), slice(k + 1, None)
        found.tokens[k, :, near] = tokens[:, far]
        found.labels[k, :, near] = labels[:, far]
        found.weights[k, :, near] = loss_mask[:, far]
        if document_ids is not None:
            found.weights[k, :, near] *= document_ids[:, near] == document_ids[:, far]
    return found


class MultiTokenPrediction(nn.Module):
    """All depths.

    Args:
        build: of the main model.
        embedding, head: the shardings of the main model's two.

    Attributes:
        sums: fp64 [D, 2], since somebody cleared it: of weighted token losses, and of weights.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        build: LayerBuild,
        embedding: WeightSharding,
        head: WeightSharding,
    ) -> None:
        super().__init__()
        self.factor = config.mtp_loss_factor / config.mtp_num_layers
        ends = {"store": build.store, "region": build.region, "init": build.init}
        self.depths = nn.ModuleList()
        for k in range(config.mtp_num_layers):
            # Each depth is one more use of both weights. They stay outside the depth's unit.
            table = VocabParallelEmbedding(embedding, **ends)
            top = VocabParallelHead(head, **ends)
            with build.store.unit(f"mtp.{k}"):
                self.depths.append(
                    PredictionDepth(
                        f"mtp.{k}", config=config, build=build, embedding=table, head=top
                    )
                )
        self.sums = torch.zeros(len(self.depths), 2, dtype=torch.float64, device=build.store.device)

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose what is computed again in backward; each depth's layers count by themselves."""
        for depth in self.depths:
            own = recompute
            if recompute.num_layers is not None:
                least = min(recompute.num_layers, len(depth.decoder.layers))
                own = dataclasses.replace(recompute, num_layers=least)
            depth.decoder.set_recompute(own)

    def forward(
        self,
        hidden: torch.Tensor,
        ahead: Ahead,
        layout: SequenceLayout,
        *,
        rope: RopeTable | None,
        aux_factor: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what the depths add to the training loss, a scalar.

        Args:
            hidden: [s, b, h], the main model's final hidden states ([s/tp, b, h] under sequence
                parallelism).
            layout: of the microbatch.

        Raises:
            ValueError: `ahead` is of another number of depths, or of other tokens.
        """
        wanted = (len(self.depths), *ahead.tokens.shape[1:2], layout.positions.shape[0])
        if any(tuple(x.shape) != wanted for x in vars(ahead).values()):
            shapes = ", ".join(str(tuple(x.shape)) for x in vars(ahead).values())
            raise ValueError(
                f"what {wanted[0]} depths predict of {wanted[2]} tokens a row has the shapes "
                f"{shapes}: make it by shifted(..., depths={wanted[0]}) and cut it as the tokens"
            )
        losses = []
        for k, depth in enumerate(self.depths):
            hidden = depth(hidden, ahead.tokens[k], layout, rope=rope, aux_factor=aux_factor)
            weights = ahead.weights[k].t()  # [s, b]
            # The factor is in the weights: a gradient that comes in as 1 then costs no pass.
            loss, nll = depth.head.loss(hidden, ahead.labels[k].t(), weights * self.factor)
            losses.append(loss)
            self.sums[k] += torch.stack([(nll * weights).sum(), weights.sum()])
        return torch.stack(losses).sum()


class PredictionDepth(nn.Module):
    """One depth: its blocks between the hidden states of the depth before and the head.

    The projection is whole on every tp rank: with sequence parallelism each rank projects its own
    tokens, without it all of them.
    """

    def __init__(
        self,
        name: str,
        *,
        config: GPTConfig,
        build: LayerBuild,
        embedding: VocabParallelEmbedding,
        head: VocabParallelHead,
    ) -> None:
        super().__init__()
        self.embedding, self.head = embedding, head
        self.drop = HiddenDropout(f"{name}.embedding", config.hidden_dropout, build=build)
        size = build.hidden_size
        shared = {"config": config.norm, "build": build}
        self.embedding_norm = Norm(f"{name}.embedding_norm", size, **shared)
        self.hidden_norm = Norm(f"{name}.hidden_norm", size, **shared)
        sharding = WeightSharding.of(
            f"{name}.projection.weight",
            (size, 2 * size),
            gradient={"tp": build.region.replicated_gradient},
        )
        self.projection = build.store.declare(sharding, build.init)
        blocks = dataclasses.replace(config.decoder, pattern=config.depth_blocks)
        self.decoder = Decoder(f"{name}.decoder", blocks, build=build)

    def forward(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        layout: SequenceLayout,
        *,
        rope: RopeTable | None,
        aux_factor: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return normalised hidden states from those of the depth before, both [s, b, h]
        ([s/tp, b, h] under sequence parallelism).

        Args:
            tokens: int64 [b, s], that follow those of the depth before.
        """
        ahead = self.drop(self.embedding(tokens.t()), layout)  # [s, b, h]
        both = torch.cat([self.embedding_norm(ahead), self.hidden_norm(hidden)], -1)  # [s, b, 2h]
        mixed = self.projection.linear(both)  # [s, b, h]
        return self.decoder(mixed, layout, rope=rope, aux_factor=aux_factor)


def carrying(loss: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """Return the loss, a scalar; what differentiates it differentiates loss + extra."""
    return _Carrying.apply(loss, extra)


class _Carrying(torch.autograd.Function):
    """forward the loss; dgrad of both as it comes. Saves nothing."""

    @staticmethod
    def forward(ctx, loss, extra):
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def take_mean_losses(model: GPTModel) -> tuple[float, ...]:
    """Return the mean loss of each depth over all ranks since the last call; NaN where nothing was
    counted.

    It weighs tokens as the training loss does. Every rank of the world calls this.
    """
    own = model.multi_token
    shape = (model.config.mtp_num_layers, 2)
    sums = torch.zeros(shape, dtype=torch.float64, device=model.store.device)
    if own is not None:
        sums.copy_(own.sums)
        own.sums.zero_()
    losses, weights = all_reduce(sums, model.groups["world"]).t()
    return tuple((losses / weights).tolist())
