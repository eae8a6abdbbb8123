# SPDX-License-Identifier: Apache-2.0
"""Checks of the model's blocks on their ranks: attention heads, latents, MLPs, recurrent mixers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.training.config import layer_pattern_options

if TYPE_CHECKING:
    from megatron.training.config import Config


def head_problems(config: Config) -> Iterator[str]:
    """Yield a message for each problem of the sizes of attention heads."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not layer_pattern_options.has_attention(config):
        return  # `missing_block_problems` reports attention options of a model without attention
    if heads is None:
        yield "missing --num-attention-heads: give it"
        return
    latent_heads = config.attention.multi_latent_attention
    if heads % tp and not latent_heads:
        yield (
            f"--num-attention-heads {heads} is not a multiple of --tensor-model-parallel-size "
            f"{tp}: change one"
        )
    if model.group_query_attention and groups is None:
        yield "--group-query-attention needs --num-query-groups: give it"
    if model.group_query_attention and groups is not None and groups > 0:
        if heads % groups:
            yield (
                f"--num-attention-heads {heads} is not a multiple of --num-query-groups "
                f"{groups}: change one"
            )
        if groups % tp and tp % groups:
            yield (
                f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must "
                "divide the other"
            )
    if latent_heads:
        channels, flag = config.attention.qk_pos_emb_head_dim, "--qk-pos-emb-head-dim"
    else:
        channels, flag = model.kv_channels or model.hidden_size // heads, "--kv-channels"
    if not latent_heads and model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{heads}: change one or give --kv-channels"
        )
    rotated = int(channels * config.position.rotary_percent)
    if config.position.is_rotary and (rotated % 2 or rotated == 0):
        yield (
            f"{rotated} features per head would be rotated ({flag} {channels} x --rotary-percent "
            f"{config.position.rotary_percent}): the number must be even and above 0"
        )


def inner_feature_problems(config: Config) -> Iterator[str]:
    """Yield a message if the features of an MLP do not divide over the ranks."""
    ffn, tp = config.model.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if ffn is not None and ffn % tp:
        yield (
            f"--ffn-hidden-size {ffn} is not a multiple of --tensor-model-parallel-size {tp}: "
            "change one"
        )


def latent_attention_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that latent attention cannot be combined with."""
    flag, model = "--multi-latent-attention", config.model
    if not config.attention.multi_latent_attention or model.num_attention_heads is None:
        return
    refused = {
        "--group-query-attention": (model.group_query_attention, "every head has its own keys"),
        "--attention-output-gate": (config.attention.attention_output_gate, "it has no gate"),
        "--add-qkv-bias": (model.add_qkv_bias, "it has no biases"),
        "--add-attention-output-bias": (model.add_attention_output_bias, "it has no biases"),
        "--window-size": (config.attention.window_size, "it attends to all preceding tokens"),
        "--softmax-type learnable": (
            config.attention.softmax_type == "learnable",
            "it has no sinks",
        ),
    }
    for conflicting, (is_set, reason) in refused.items():
        if is_set:
            yield f"{conflicting} cannot be combined with {flag}: {reason}: drop one"
    if not model.disable_bias_linear:
        yield f"{flag} has no biases: add --disable-bias-linear (MLPs: --add-mlp-bias)"
    if not config.position.is_rotary:
        kind = config.position.position_embedding_type
        yield f"--position-embedding-type {kind} cannot be combined with {flag}: use rope or yarn"
    # Imported on demand: options of other models do not need to import torch.
    from megatron.training.config.model_table import part_config

    parallel = config.parallel
    latent = part_config(config, "attention")
    for problem in latent.problems(
        parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        engine=parallel.cp_comm_type,
    ):
        yield f"{flag}: {problem}"


def recurrent_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each problem of the shapes of recurrent blocks."""
    # Imported on demand: the model table imports this module's callers.
    from megatron.training.config.model_table import recurrent_shapes

    hybrid, parallel, width = config.hybrid, config.parallel, 2 * config.model.hidden_size
    shapes = recurrent_shapes(config)
    if "Mamba-2" in shapes and hybrid.mamba_num_heads is None and width % hybrid.mamba_head_dim:
        yield (
            f"--mamba-head-dim {hybrid.mamba_head_dim} does not divide 2 x --hidden-size = "
            f"{width}: change one or give --mamba-num-heads"
        )
        return
    for name, shape in shapes.items():
        for problem in shape.problems(
            parallel.tensor_model_parallel_size,
            cp=parallel.context_parallel_size,
            mode=parallel.linear_cp_mode,
        ):
            yield f"{name}: {problem}"


def learned_position_problems(config: Config) -> Iterator[str]:
    """Yield a message if learned positions cannot be combined with the model."""
    learned = config.position.position_embedding_type == "learned_absolute"
    if learned and layer_pattern_options.mtp_num_layers(config):
        yield (
            "--position-embedding-type learned_absolute cannot be combined with multi-token "
            "prediction, which embeds tokens without positions: use rope, yarn or none"
        )
