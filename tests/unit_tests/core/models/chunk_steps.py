# SPDX-License-Identifier: Apache-2.0
"""Steps of a GPT split into chunks on one rank, one microbatch at a time."""

from __future__ import annotations

import dataclasses

import torch

from megatron.core import ProcessGroupCollection
from megatron.core.boxes import Box
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from tests.support.inputs import Microbatch, generator, microbatch
from tests.support.nan_memory import nan_memory

LAYERS, HIDDEN, VOCABULARY, BATCH, SEQUENCE = 3, 24, 37, 3, 8

#: RMSNorm, gated MLPs, query-key norms, dropout everywhere.
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
#: LayerNorm, plain MLPs, biases, tied embeddings.
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


def slice_of_box(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the slice of a logical tensor in a box."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def weight_values(model: GPTModel) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """Return copies of this rank's weight chunks, by name and offsets."""
    chunks = (
        chunks for handle in model.store.handles.values() for chunks in model.store.chunks(handle)
    )
    return {(chunk.name, chunk.box.offsets): chunk.tensor.clone() for chunk in chunks}


def move(model: GPTModel) -> GPTModel:
    """Perturb every weight by a function of its name and position alone; return the model."""
    for handle in model.store.handles.values():
        for chunk in model.store.chunks(handle):
            noise = torch.randn(chunk.shape, generator=generator(3, *chunk.name.encode()))
            chunk.tensor.add_(slice_of_box(0.1 * noise, chunk.box).to(chunk.tensor.dtype))
    return model


def step_microbatch(index: int) -> Microbatch:
    """Return a microbatch of the step."""
    return microbatch(
        seed=6, dp_rank=0, index=index, batch=BATCH, sequence=SEQUENCE, vocabulary=VOCABULARY
    )


def train_step(model: GPTModel, *, microbatches: int = 2) -> tuple[list, dict]:
    """Run a step, one microbatch after the other.

    Returns:
        (loss, nll) of each microbatch, and all gradients by name and offsets.
    """
    engine = DataParallel(model.store, model.groups)
    engine.begin_step(program=())
    losses = []
    with nan_memory():
        for i in range(microbatches):
            microbatch_pass = MicrobatchPass(model, step_microbatch(i))
            microbatch_pass.forward()
            if i == microbatches - 1:
                for chunk in range(model.num_chunks):
                    engine.begin_last_backward(chunk)
            microbatch_pass.backward()
            for chunk in range(model.num_chunks):
                engine.post_backward(chunk)
            losses.append(microbatch_pass.loss)
        engine.finish()
    gradients = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            gradient = flat[box.start : box.start + box.numel].view(box.sizes)
            gradients[box.name, box.offsets] = gradient.clone()
    return losses, gradients


class MicrobatchPass:
    """The pass of a microbatch through all chunks of a model."""

    def __init__(self, model: GPTModel, batch: Microbatch) -> None:
        self.model, self.batch = model, batch
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.loss: tuple[torch.Tensor, torch.Tensor]

    def forward(self) -> None:
        """Run the forward of all chunks."""
        batch, hidden = self.batch, None
        for chunk in range(self.model.num_chunks):
            shared = {"chunk": chunk, "hidden_states": hidden, "layout": batch.layout}
            if chunk == self.model.num_chunks - 1:
                loss, nll = self.model.loss(batch.tokens, batch.labels, batch.loss_mask, **shared)
                self.outputs.append(loss)
                self.loss = (loss.detach(), nll.detach())
                return
            output = self.model(batch.tokens, **shared)
            assert output.shape == self.model.boundary_shape(batch.tokens)
            assert output.dtype == self.model.store.dtype
            self.outputs.append(output)
            hidden = output.detach().requires_grad_()
            self.inputs.append(hidden)

    def backward(self) -> None:
        """Run the backward of all chunks."""
        gradient = None
        for chunk in reversed(range(self.model.num_chunks)):
            torch.autograd.backward((self.outputs[chunk],), (gradient,))
            gradient = self.inputs[chunk - 1].grad if chunk else None


def build_model(
    config: GPTConfig, groups: ProcessGroupCollection | None = None, **options: object
) -> GPTModel:
    """Return a model with perturbed weights."""
    return move(GPTModel(config, groups or ProcessGroupCollection.single(), seed=5, **options))
