# SPDX-License-Identifier: Apache-2.0
"""Steps of a GPT cut into chunks, with sends and receives by hand, in order, one at a time."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from megatron.core.boxes import Box
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from tests.support.inputs import Microbatch, generator, microbatch
from tests.support.nan_memory import nan_memory

LAYERS, HIDDEN, VOCABULARY, BATCH, SEQUENCE = 3, 24, 37, 3, 8

#: RMSNorm, gated MLPs, heads of their own norm, dropout everywhere.
UNTIED = GPTConfig(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    attention=AttentionConfig(
        num_attention_heads=4, num_query_groups=2, kv_channels=10, qk_norm=True, dropout=0.3
    ),
    mlp=MLPConfig(ffn_hidden_size=20),
    hidden_dropout=0.2,
)
#: LayerNorm, plain MLPs, biases, one weight at both ends.
TIED = dataclasses.replace(
    UNTIED,
    attention=AttentionConfig(
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=10,
        qkv_bias=True,
        output_bias=True,
    ),
    mlp=MLPConfig(ffn_hidden_size=20, gated=False, activation="gelu", bias=True),
    norm=NormConfig(kind="LayerNorm"),
    tied=True,
)
MODELS = {"untied": UNTIED, "tied": TIED}


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the part of a logical tensor that a box holds."""
    for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole


def values(model: GPTModel) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """Return a copy of every box that the rank has of its weights, by name and offsets."""
    held = (held for handle in model.store.handles.values() for held in model.store.chunks(handle))
    return {(each.name, each.box.offsets): each.tensor.clone() for each in held}


def move(model: GPTModel) -> GPTModel:
    """Move every weight off its initial value by a function of its name and place alone."""
    for handle in model.store.handles.values():
        for held in model.store.chunks(handle):
            noise = torch.randn(held.shape, generator=generator(3, *held.name.encode()))
            held.tensor.add_(cut(0.1 * noise, held.box).to(held.tensor.dtype))
    return model


def data(index: int) -> Microbatch:
    """Return a microbatch of the step."""
    return microbatch(
        seed=6, dp_rank=0, index=index, batch=BATCH, sequence=SEQUENCE, vocabulary=VOCABULARY
    )


def trained(model: GPTModel, *, microbatches: int = 2) -> tuple[list, dict]:
    """Run a step, one microbatch after the other.

    Returns:
        (loss, nll) of each microbatch where the head is, and all gradients by name and offsets.
    """
    engine = DataParallel(model.store, model.groups)
    engine.begin_step(program=())
    losses = []
    with nan_memory():
        for i in range(microbatches):
            line = Line(model, data(i))
            line.forward()
            if i == microbatches - 1:
                for chunk in range(model.num_chunks):
                    engine.begin_last_backward(chunk)
            line.backward()
            for chunk in range(model.num_chunks):
                engine.post_backward(chunk)
            if line.loss is not None:
                losses.append(line.loss)
        engine.finish()
    found = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            part = flat[box.start : box.start + box.numel].view(box.sizes)
            found[box.name, box.offsets] = part.clone()
    return losses, found


class Line:
    """One microbatch on its way through all virtual stages, as seen from one rank."""

    def __init__(self, model: GPTModel, batch: Microbatch) -> None:
        self.model, self.batch = model, batch
        self.stages, self.stage = model.split.stages, model.groups["pp"].rank
        self.inputs: dict[int, torch.Tensor | None] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.loss: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def own(self) -> list[int]:
        """The virtual stages of this rank in the order of forward."""
        return [c * self.stages + self.stage for c in range(self.model.num_chunks)]

    def forward(self) -> None:
        """Go through all virtual stages of this rank."""
        total = self.stages * self.model.num_chunks
        for g in self.own:
            hidden = self._arrived(g - 1, self.outputs) if g else None
            if hidden is not None:
                hidden = hidden.detach().requires_grad_()
            self.inputs[g] = hidden
            shared = {
                "chunk": g // self.stages,
                "hidden_states": hidden,
                "layout": self.batch.layout,
            }
            batch = self.batch
            if g == total - 1:
                loss, nll = self.model.loss(batch.tokens, batch.labels, batch.loss_mask, **shared)
                self.outputs[g], self.loss = loss, (loss.detach(), nll.detach())
                continue
            output = self.model(batch.tokens, **shared)
            assert output.shape == self.model.boundary_shape(batch.tokens)
            assert output.dtype == self.model.store.dtype
            self.outputs[g] = output
            self._pass(output.detach(), g + 1)

    def backward(self) -> None:
        """Go back through all virtual stages of this rank."""
        total = self.stages * self.model.num_chunks
        gradients: dict[int, torch.Tensor] = {}
        for g in reversed(self.own):
            gradient = None if g == total - 1 else self._arrived(g + 1, gradients)
            torch.autograd.backward((self.outputs[g],), (gradient,))
            if (hidden := self.inputs[g]) is not None:
                assert hidden.grad is not None
                gradients[g] = hidden.grad
                self._pass(hidden.grad, g - 1)

    def _rank(self, g: int) -> int:
        """Return the global rank of a virtual stage."""
        return self.model.groups["pp"].ranks[g % self.stages]

    def _arrived(self, g: int, here: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return what virtual stage `g` gives this rank."""
        if self.stages == 1:
            return here[g]
        recv_buffer = torch.full(
            self.model.boundary_shape(self.batch.tokens), torch.nan, dtype=self.model.store.dtype
        )
        dist.recv(recv_buffer, self._rank(g))
        return recv_buffer

    def _pass(self, tensor: torch.Tensor, g: int) -> None:
        """Give a tensor to virtual stage `g`."""
        if self.stages > 1:
            dist.send(tensor.contiguous(), self._rank(g))


def built(
    config: GPTConfig, groups: ProcessGroupCollection | None = None, **options: object
) -> GPTModel:
    """Return a model off its initial values."""
    return move(GPTModel(config, groups or ProcessGroupCollection.single(), seed=5, **options))
