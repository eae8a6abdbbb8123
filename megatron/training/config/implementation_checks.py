# SPDX-License-Identifier: Apache-2.0
"""Checks of the implementations: TransformerEngine, FP8 and FP4, attention kernels, CUDA graphs.

Also the core config of FP8 or FP4 that the options describe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.extensions import QuantizationConfig, transformer_engine_problem
from megatron.core.models.layer_pattern import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    LATENT,
    MAMBA,
    SHORT_CONV,
)
from megatron.training.config.layer_pattern_options import (
    blocks,
    has_attention,
    is_recurrent,
    mamba_heads,
    mtp_blocks,
    num_layers,
)

if TYPE_CHECKING:
    from megatron.training.config import Config


def transformer_engine_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that TransformerEngine does not support."""
    if config.parallel.transformer_impl != "transformer_engine":
        return
    flag = "--transformer-impl transformer_engine"
    chosen = config.execution
    softcap = config.activations.attn_logit_softcapping
    if softcap is not None:
        yield f"{flag} has no --attn-logit-softcapping {softcap}: use --transformer-impl local"
    if chosen.cuda_graph_impl != "none":
        yield f"{flag} cannot be captured by --cuda-graph-impl {chosen.cuda_graph_impl}: drop one"


def machine_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each requirement that this machine does not meet."""
    if config.parallel.transformer_impl == "transformer_engine":
        problem = transformer_engine_problem()
        if problem is not None:
            flag = "--transformer-impl transformer_engine"
            yield f"{flag}: {problem}, or take --transformer-impl local"


def attention_kernel_problems(config: Config) -> Iterator[str]:
    """Yield a message if the attention kernel does not support the model."""
    dropout = config.attention.attention_dropout
    attends = has_attention(config)
    if attends and config.parallel.attention_backend == "triton" and dropout:
        yield (
            f"--attention-backend triton does not support --attention-dropout {dropout}: set that "
            "to 0 or "
            "use auto"
        )


DOCUMENTS = "--reset-attention-mask"


def cuda_graph_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each option that CUDA graphs cannot be combined with."""
    chosen = config.execution
    if chosen.cuda_graph_impl == "none":
        return
    flag = f"--cuda-graph-impl {chosen.cuda_graph_impl}"
    cp = config.parallel.context_parallel_size
    packed = config.data.sft or config.data.reset_attention_mask
    if config.training.device == "cpu":
        yield f"{flag} needs a GPU: drop it or --device cpu"
    size = config.pipeline.pipeline_model_parallel_size
    for conflicting, on, reason in (
        (
            f"--pipeline-model-parallel-size {size}",
            size > 1,
            "sends and receives between stages, which a graph cannot capture",
        ),
        (
            f"--context-parallel-size {cp} with {'--sft' if config.data.sft else DOCUMENTS}",
            cp > 1 and packed,
            "attends block by block at document boundaries, with other blocks in every step",
        ),
        (
            f"recurrent blocks with {'--sft' if config.data.sft else DOCUMENTS}",
            is_recurrent(config) and packed,
            "process sequences of other lengths in every step",
        ),
        (
            "--step-batch-size-schedule",
            config.training.step_batch_size_schedule is not None,
            "changes the number of microbatches, and the graph has a fixed number",
        ),
        (
            "--rampup-batch-size",
            config.training.rampup_batch_size is not None,
            "changes the number of microbatches, and the graph has a fixed number",
        ),
        (
            "--check-weight-gather",
            config.data_parallel.check_weight_gather,
            "compares the order of gathers on the host in every step",
        ),
        (
            "--check-collectives",
            config.failures.check_collectives,
            "does not see the collectives of a replayed step",
        ),
        (
            "--log-straggler",
            config.failures.log_straggler,
            "does not see how long a replayed step waits",
        ),
    ):
        if on:
            yield f"{conflicting} {reason}: drop it or {flag}"
    steps, iterations = chosen.cuda_graph_warmup_steps, config.training.train_iters
    if iterations is not None and steps >= iterations:
        yield (
            f"--cuda-graph-warmup-steps {steps} is not below --train-iters {iterations}, so that "
            "no graph is captured: lower it"
        )


def quantization(config: Config) -> QuantizationConfig | None:
    """Return the FP8 or FP4 config of the linear layers; None if neither is enabled."""
    chosen = config.quantization
    if chosen.flag is None:
        return None
    outer = chosen.first_last_layers_bf16
    return QuantizationConfig(
        recipe=chosen.fp8_recipe if chosen.fp4_format is None else "nvfp4",
        hybrid=chosen.fp8_format == "hybrid",
        margin=chosen.fp8_margin,
        amax_history_len=chosen.fp8_amax_history_len,
        amax_compute_algo=chosen.fp8_amax_compute_algo,
        num_layers_at_start=chosen.num_layers_at_start_in_bf16 if outer else 0,
        num_layers_at_end=chosen.num_layers_at_end_in_bf16 if outer else 0,
    )


def quantization_problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each problem of the FP8 and FP4 options."""
    chosen, recipe_config = config.quantization, quantization(config)
    if recipe_config is None:
        return
    if chosen.fp8_format is not None and chosen.fp4_format is not None:
        yield f"--fp8-format {chosen.fp8_format} and --fp4-format {chosen.fp4_format}: drop one"
    if config.parallel.transformer_impl != "transformer_engine":
        yield f"{chosen.flag} needs --transformer-impl transformer_engine: add it"
    elif transformer_engine_problem() is None:
        from megatron.core.extensions import transformer_engine  # on demand: it is an extra

        reason = transformer_engine.quantization_problem(recipe_config)
        if reason is not None:
            yield (
                f"{chosen.flag}: this GPU does not support {recipe_config.recipe} ({reason}): use "
                "another "
                "recipe"
            )
    layers = num_layers(config)
    num_bf16_layers = recipe_config.num_layers_at_start + recipe_config.num_layers_at_end
    if num_bf16_layers >= layers:
        yield (
            f"--first-last-layers-bf16 keeps {num_bf16_layers} layers of {layers} in bf16: lower "
            f"--num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or drop {chosen.flag}"
        )
    yield from _sizes(config, recipe_config)


def _sizes(config: Config, recipe_config: QuantizationConfig) -> Iterator[str]:
    """Yield a message for each dimension of a rank that is not a multiple the recipe requires."""
    multiple, rows = recipe_config.weight_multiple, recipe_config.row_multiple
    flag, training, parallel = config.quantization.flag, config.training, config.parallel
    tp = parallel.tensor_model_parallel_size
    for size, name in _weight_sizes(config, tp):
        if size % multiple:
            yield (
                f"{flag} ({recipe_config.recipe}) needs weight dimensions that are multiples of "
                f"{multiple}, "
                f"and a rank has {size} of {name}: change it"
            )
    shares = parallel.context_parallel_size * (tp if parallel.sequence_parallel else 1)
    length = training.seq_length // shares
    for batch, name in (
        (training.micro_batch_size, "--micro-batch-size"),
        (config.evaluation.eval_micro_batch_size, "--eval-micro-batch-size"),
    ):
        if batch is not None and length * batch % rows:
            yield (
                f"{flag} ({recipe_config.recipe}) needs multiples of {rows} tokens, and a rank has "
                f"{length} of --seq-length x {batch} of {name}: change one"
            )


def _weight_sizes(config: Config, tp: int) -> Iterator[tuple[int, str]]:
    """Yield the dimensions of a rank's weights, each with the options that set it."""
    model, experts = config.model, config.experts
    kinds = set(blocks(config) + mtp_blocks(config))
    yield model.hidden_size, "--hidden-size"
    if DENSE in kinds:
        yield model.inner_features // tp, "--ffn-hidden-size"
    heads = model.num_attention_heads
    if ATTENTION in kinds and heads is not None:
        channels = model.kv_channels or model.hidden_size // heads
        groups = model.num_query_groups or heads
        yield heads // tp * channels, "--num-attention-heads x --kv-channels"
        qkv_heads = heads // tp + 2 * max(1, groups // tp)
        yield (
            qkv_heads * channels,
            "(--num-attention-heads + 2 x --num-query-groups) x --kv-channels",
        )
    if LATENT in kinds and heads is not None:
        yield from _latent_sizes(config, heads // tp)
    yield from _recurrent_sizes(config, kinds, tp)
    if experts.num_experts is not None:
        etp = config.parallel.expert_tensor_parallel_size or tp
        width = experts.moe_ffn_hidden_size or model.inner_features
        yield width // etp, "--moe-ffn-hidden-size"
        if experts.moe_shared_expert_intermediate_size is not None:
            shared = experts.moe_shared_expert_intermediate_size
            yield shared // tp, "--moe-shared-expert-intermediate-size"


def _latent_sizes(config: Config, heads: int) -> Iterator[tuple[int, str]]:
    """Yield the dimensions of latent attention's weights with `heads` heads on a rank."""
    chosen = config.attention
    query = chosen.qk_head_dim + chosen.qk_pos_emb_head_dim
    yield heads * query, "--num-attention-heads x (--qk-head-dim + --qk-pos-emb-head-dim)"
    head_features = chosen.qk_head_dim + chosen.v_head_dim
    yield heads * head_features, "--num-attention-heads x (--qk-head-dim + --v-head-dim)"
    yield heads * chosen.v_head_dim, "--num-attention-heads x --v-head-dim"
    yield chosen.kv_lora_rank, "--kv-lora-rank"
    if chosen.q_lora_rank is not None:
        yield chosen.q_lora_rank, "--q-lora-rank"


def _recurrent_sizes(config: Config, kinds: set[str], tp: int) -> Iterator[tuple[int, str]]:
    """Yield the dimensions of a rank's projections of recurrent mixers."""
    hybrid = config.hybrid
    if DELTA_NET in kinds:
        keys = hybrid.linear_num_key_heads * hybrid.linear_key_head_dim
        values = hybrid.linear_num_value_heads * hybrid.linear_value_head_dim
        rows = 2 * (keys + values + hybrid.linear_num_value_heads) // tp
        name = "--linear-num-value-heads x --linear-value-head-dim"
        yield values // tp, name
        yield rows, f"2 x (--linear-num-key-heads x --linear-key-head-dim + {name} + its heads)"
    if MAMBA in kinds:
        heads = mamba_heads(config)
        inner = heads * hybrid.mamba_head_dim
        shared = max(1, hybrid.mamba_num_groups // tp) * hybrid.mamba_state_dim
        yield inner // tp, "--mamba-num-heads x --mamba-head-dim"
        yield (
            (2 * inner + heads) // tp + 2 * shared,
            "2 x --mamba-num-heads x --mamba-head-dim + 2 x --mamba-num-groups x "
            "--mamba-state-dim + --mamba-num-heads",
        )
    if SHORT_CONV in kinds:
        yield config.model.hidden_size // tp, "--hidden-size"
