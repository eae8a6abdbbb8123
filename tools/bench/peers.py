# SPDX-License-Identifier: Apache-2.0
"""The training step of transformers' Llama in its best known configuration: forward, backward,
gradient clipping, fused AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tools.bench import shapes
from tools.bench.shapes import Shape
from tools.bench.turns import Step

if TYPE_CHECKING:
    from transformers import LlamaConfig


def tokens_of(shape: Shape) -> torch.Tensor:
    """Return the batch that every variant trains on, [batch, sequence + 1] int64."""
    generator = torch.Generator().manual_seed(shapes.SEED)
    size = (shape.batch, shape.sequence + 1)
    return torch.randint(0, shape.vocabulary, size, generator=generator)


def llama_config(shape: Shape, **options: object) -> LlamaConfig:
    """Return transformers' configuration of a shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        rms_norm_eps=shapes.NORM_EPSILON,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **options,
    )


def transformers_step(shape: Shape, precision: str, *, device: torch.device | None = None) -> Step:
    """Build a step of transformers' Llama.

    Args:
        shape: model and batch.
        precision: "fp32", "autocast" (bf16 with fp32 weights), "compiled" (autocast under
            torch.compile) or "bf16" (weights, gradients and moments in bf16 too).
        device: where; None is the CPU.
    """
    from transformers import LlamaForCausalLM

    torch.manual_seed(shapes.SEED)
    config = llama_config(
        shape,
        max_position_embeddings=shape.sequence,
        initializer_range=shapes.INIT_STD,
        use_cache=False,
    )
    device = device or torch.device("cpu")
    with device:
        model = LlamaForCausalLM(config).train()
    if precision == "bf16":
        model.to(torch.bfloat16)
    _check_parameters(model, shape)
    optimizer = _adamw(model)
    forward = torch.compile(model) if precision == "compiled" else model
    tokens = tokens_of(shape).to(device)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    autocast = precision not in ("fp32", "bf16")

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = forward(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), shapes.CLIP)
        optimizer.step()
        return loss.item()

    return step


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the fused AdamW that the peer trains with."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=shapes.LEARNING_RATE,
        betas=shapes.BETAS,
        eps=shapes.EPSILON,
        weight_decay=shapes.WEIGHT_DECAY,
        fused=True,
    )


def _check_parameters(model: torch.nn.Module, shape: Shape) -> None:
    """Raise ValueError if a peer's model is not of our shape: the race would be over other work."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters != shape.parameters:
        raise ValueError(f"the peer has {num_parameters} weights, the shape {shape.parameters}")
