# SPDX-License-Identifier: Apache-2.0
"""The names of a training step's settings, read from its objects and not from the options.

`docs/status.md` has a row for each name; see `status_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.core.backend import Backend
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt_config import GPTConfig
from megatron.core.optimizer import Optimizer
from megatron.core.optimizer.loss_scaler import ConstantLossScaler
from megatron.core.transformer import AttentionConfig, Recompute
from megatron.training.cuda_graphs import FullIterationGraph
from megatron.training.step import Microbatch, TrainStep

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ENGINES = {
    "p2p": "ring attention",
    "all_gather": "context all-gather",
    "a2a": "context all-to-all",
}
_MODES = {"headwise": "headwise recurrence", "segments": "segmented recurrence"}
_DISPATCHERS = {"alltoall": "all-to-all dispatcher", "allgather": "all-gather dispatcher"}


def model_settings(config: GPTConfig, *, tp: int) -> Iterator[str]:
    """Yield the settings of a model.

    Args:
        tp: tensor-parallel size.
    """
    yield config.norm.kind
    yield "tied embedding" if config.tied else "untied head"
    if config.mlp is not None:
        yield "gated MLP" if config.mlp.gated else "plain MLP"
        if config.mlp.bias:
            yield "biases"
    attention = config.attention
    if config.hidden_dropout or (attention is not None and attention.dropout):
        yield "dropout"
    if config.rope is None:
        yield "no positions"
    elif config.rope.scaling is not None:
        yield "scaled rope"
    if config.mtp_num_layers:
        yield "multi-token prediction"
    if isinstance(attention, AttentionConfig):
        yield from _attention(attention, tp)
    elif attention is not None:
        yield "latent attention"
    yield from _recurrence(config, tp)
    yield from _experts(config)


def _attention(attention: AttentionConfig, tp: int) -> Iterator[str]:
    heads, groups = attention.num_attention_heads, attention.num_query_groups
    yield "multi-head attention" if heads == groups else "grouped-query attention"
    if groups < tp:
        yield "fewer kv heads than tp"
    if attention.qk_norm:
        yield "q/k norm"
    if attention.qkv_bias and not attention.output_bias:
        yield "q/k/v biases"
    if attention.window is not None:
        yield "sliding window"
    if attention.sinks:
        yield "attention sinks"
    if attention.output_gate:
        yield "attention output gate"


def _recurrence(config: GPTConfig, tp: int) -> Iterator[str]:
    if config.delta_net is not None:
        yield "gated delta net"
    if config.mamba is not None:
        yield "Mamba-2"
        if config.mamba.num_groups < tp:
            yield "fewer groups than tp"
        if config.mamba.normed_groups < tp:
            yield "norm over several ranks"


def _experts(config: GPTConfig) -> Iterator[str]:
    moe = config.moe
    if moe is None:
        return
    yield f"{moe.router.score_function} router"
    yield "dropless experts" if moe.capacity_factor is None else f"drop policy {moe.drop_policy}"
    if moe.shared_ffn_hidden_size is not None:
        yield "gated shared expert" if moe.shared_gate else "shared expert"
    if config.has_auxiliary_losses:
        yield "router losses"
    if moe.router.expert_bias:
        yield "expert bias balancing"


def training_settings(engine: DataParallel, optimizer: Optimizer) -> Iterator[str]:
    """Yield the settings of gradient reduction and of the optimizer."""
    config, optimizer_config = engine.config, optimizer.config
    yield _DTYPES[engine.store.dtype]
    many = engine.groups["dense_dp"].size > 1
    if many:
        yield "overlapped grad reduce" if config.overlap_grad_reduce else "grad reduce at the end"
    if engine.placement.optimizer and config.overlap_param_gather:
        yield "overlapped param gather"
    if engine.placement.weight and config.granularity == "weight":
        yield "param gather per weight"
    if engine.placement.optimizer and config.outer == "optim":
        yield "state sharded over instances"
    if many and config.fp32_accumulation:
        yield "bf16 gradients summed in fp32"
    yield {"adam": "AdamW", "sgd": "SGD", "muon": "Muon"}[optimizer_config.kind]
    if torch.bfloat16 in (optimizer_config.exp_avg_dtype, optimizer_config.exp_avg_sq_dtype):
        yield "moments in bf16"
    if optimizer_config.offload_fraction:
        yield "optimizer CPU offload"
    if optimizer_config.lr_factors or optimizer_config.decay_factors:
        yield "per-weight lr and wd factors"
    if not isinstance(optimizer.scaler, ConstantLossScaler) or optimizer.scaler.scale != 1.0:
        yield "loss scale"


def model_paths(config: GPTConfig, engine: DataParallel, backend: Backend) -> Iterator[str]:
    """Yield the selected context-parallel engine, recurrence mode and token dispatcher."""
    if engine.groups["cp"].size > 1 and backend.context_engine in _ENGINES:
        yield _ENGINES[backend.context_engine]
    recurrent = config.delta_net is not None or config.mamba is not None
    if recurrent and engine.groups["cp"].size > 1 and backend.linear_mode in _MODES:
        yield _MODES[backend.linear_mode]
    spread = engine.groups.grid.ep > 1 or engine.groups.grid.size("etp") > 1
    if config.moe is not None and spread and backend.dispatcher in _DISPATCHERS:
        yield _DISPATCHERS[backend.dispatcher]


def step_settings(
    step: TrainStep, microbatches: Sequence[Microbatch], recompute: Recompute
) -> Iterator[str]:
    """Yield the settings of the step itself."""
    if recompute.granularity is not None:
        yield f"{recompute.granularity} recompute"
    yield "per-token loss" if step.per_token_loss else "mean loss"
    if len(microbatches) > 1:
        yield "gradient accumulation"
    if any(_packed(batch) for batch in microbatches):
        yield "packed documents"
    if isinstance(step.forward_backward, FullIterationGraph) and step.forward_backward.replays:
        yield "CUDA graph (stand-in)"


def _packed(batch: Microbatch) -> bool:
    return batch.layout.documents is not None or batch.layout.document_ids is not None
