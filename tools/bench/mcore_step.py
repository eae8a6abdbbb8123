# SPDX-License-Identifier: Apache-2.0
"""A training step of our GPT, through the parts that the training loop uses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.core.backend import LOCAL, Backend
from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from megatron.core.transformer.recompute import Recompute
from tools.bench import shapes
from tools.bench.peers import tokens_of
from tools.bench.shapes import Shape
from tools.bench.turns import Step

OPTIMIZER = OptimizerConfig(
    adam_beta1=shapes.BETAS[0],
    adam_beta2=shapes.BETAS[1],
    adam_eps=shapes.EPSILON,
    clip_grad=shapes.CLIP,
)


def config_of(shape: Shape) -> GPTConfig:
    """Return the model of a shape."""
    return GPTConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        vocab_size=shape.vocabulary,
        attention=AttentionConfig(
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            kv_channels=shape.hidden // shape.heads,
        ),
        mlp=MLPConfig(ffn_hidden_size=shape.ffn),
        norm=NormConfig(epsilon=shapes.NORM_EPSILON),
        rope=RopeConfig(base=shapes.ROPE_BASE),
        init_std=shapes.INIT_STD,
    )


def training_step(
    shape: Shape,
    *,
    bf16: bool,
    device: torch.device | None = None,
    recompute: Recompute | None = None,
) -> Step:
    """Build a step: forward, backward into flat fp32 gradients, clip, AdamW.

    Args:
        shape: model and batch.
        bf16: bf16 weights and activations with fp32 masters, else fp32.
        device: where; None is the CPU.
        recompute: recompute settings; None recomputes nothing.
    """
    step, model, _ = training_parts(shape, bf16=bf16, device=device)
    if recompute is not None:
        model.set_recompute(recompute)
    return step


def training_parts(
    shape: Shape,
    *,
    bf16: bool,
    device: torch.device | None = None,
    config: GPTConfig | None = None,
    before_update: Callable[[], None] = lambda: None,
    groups: ProcessGroupCollection | None = None,
    backend: Backend = LOCAL,
) -> tuple[Step, GPTModel, Optimizer]:
    """Build a step (see `training_step`) and return it with its model and optimizer.

    Args:
        config: configuration of another model with the shape's vocabulary; None uses the shape.
        before_update: called in every step before a weight changes.
        groups: process groups of this rank; None is a single process.
        backend: backend of the model.
    """
    groups = groups or ProcessGroupCollection.single()
    dtype = torch.bfloat16 if bf16 else torch.float32
    device = device or torch.device("cpu")
    model = GPTModel(
        config or config_of(shape),
        groups,
        seed=shapes.SEED,
        dtype=dtype,
        device=device,
        backend=backend,
    )
    if config is None and model.store.num_parameters != shape.parameters:
        raise ValueError(
            f"our model has {model.store.num_parameters} weights, the shape {shape.parameters}"
        )
    engine = DataParallel(model.store, groups)
    optimizer = Optimizer(engine.owned(), groups, config=OPTIMIZER)
    tokens = tokens_of(shape).to(device)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    weights = torch.full(labels.shape, 1.0 / labels.numel(), device=device)
    layout = SequenceLayout.of_rows(shape.sequence, device=device)
    layout = layout.with_samples(torch.arange(shape.batch, device=device))

    def step() -> float:
        engine.begin_step()
        loss, _ = model.loss(inputs, labels, weights, layout=layout)
        engine.backward(loss, last=True)
        engine.finish()
        before_update()
        optimizer.step(shapes.LEARNING_RATE, shapes.WEIGHT_DECAY)
        engine.start_param_sync()
        return loss.item()

    return step, model, optimizer
