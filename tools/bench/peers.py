# SPDX-License-Identifier: Apache-2.0
"""Training steps of peer libraries' models, in their best known configuration.

Each builder returns one full step: forward, backward, gradient clipping, fused AdamW. transformers
comes with the test environment. megatron-core is installed on request into a separate folder: it
has the same import path as this package, so the two can never share a process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tools.bench import shapes
from tools.bench.shapes import Shape
from tools.bench.turns import Step

if TYPE_CHECKING:
    from transformers import LlamaConfig

MEGATRON_CORE_VERSION = "0.16.1"  # the last with wheels for Python 3.11
MEGATRON_CORE_FOLDER = Path(f"build/peers/megatron-core-{MEGATRON_CORE_VERSION}")


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


def install_megatron_core(folder: Path = MEGATRON_CORE_FOLDER) -> Path:
    """Install megatron-core without its dependencies into `folder`, once; return the folder."""
    if not (folder / "megatron" / "core").exists():
        requirement = f"megatron-core=={MEGATRON_CORE_VERSION}"
        print(f"bench: installing {requirement} into {folder}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), requirement], check=True)
    return folder


def megatron_core_step(shape: Shape, folder: Path = MEGATRON_CORE_FOLDER) -> Step:
    """Build a fp32 step of megatron-core's GPTModel, which takes some persuasion on a CPU.

    Must be called in a process that has imported nothing of `megatron` yet.
    """
    sys.path.insert(0, str(folder.resolve()))
    _become_one_cpu_rank()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        normalization="RMSNorm",
        layernorm_epsilon=shapes.NORM_EPSILON,
        init_method_std=shapes.INIT_STD,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        position_embedding_type="rope",
        rotary_base=int(shapes.ROPE_BASE),
        share_embeddings_and_output_weights=False,
    ).train()
    _check_parameters(model, shape)
    optimizer = _adamw(model)
    tokens = tokens_of(shape)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(shape.sequence).expand(shape.batch, -1)
    causal = torch.ones(shape.sequence, shape.sequence, dtype=torch.bool).triu(1)[None, None]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, positions, causal, labels=labels).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), shapes.CLIP)
        optimizer.step()
        return loss.item()

    return step


def _become_one_cpu_rank() -> None:
    """Fake the GPU environment of megatron-core: groups, a current device, a CUDA RNG."""
    import torch.distributed as dist

    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as tp_random

    parallel_state.initialize_model_parallel()
    tracker = type(tp_random.get_cuda_rng_tracker())
    tracker.fork = lambda self, name="": contextlib.nullcontext()


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the fused AdamW that both peers train with."""
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
