# SPDX-License-Identifier: Apache-2.0
"""What a token attends to, latent attention, and what that is not to be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.training.config.values import fraction, not_negative, positive, require_all

if TYPE_CHECKING:
    from megatron.training.config import Config


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a token attends to and how; multi-head latent attention."""

    attention_dropout: float = 0.1
    """Dropout rate of attention probabilities."""
    qk_layernorm: bool = False
    """Normalise each query and key head before the rotary embedding."""
    attention_output_gate: bool = False
    """Multiply what each head gives by the sigmoid of a learned product with the token."""
    window_size: int | None = None
    """Tokens that a token attends to, itself and those right before it; derived: all of them."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """learnable gives each query head a learned logit that takes attention and has no value, a
    sink."""
    multi_latent_attention: bool = False
    """Pass queries, and keys with values, through vectors of low rank; a cache keeps those of keys
    and values alone, for all heads together."""
    q_lora_rank: int | None = None
    """Features of a token's low-rank query vector; none computes queries directly."""
    kv_lora_rank: int = 32
    """Features of a token's low-rank vector of keys and values."""
    qk_head_dim: int = 128
    """Features of a head's query and key that do not rotate."""
    qk_pos_emb_head_dim: int = 64
    """Features of a head's query and key that rotate; those of keys are the same for all heads."""
    v_head_dim: int = 128
    """Features of a head's value."""
    mscale: float = 1.0
    """With yarn, what rotates of queries and keys grows by 0.1 x this x ln(scaling factor) + 1."""
    mscale_all_dim: float = 0.0
    """With yarn, all features of queries and keys grow by 0.1 x this x ln(scaling factor) + 1, by
    way of the softmax scale; of what rotates --mscale says all."""

    def __post_init__(self) -> None:
        require_all(
            lambda: fraction(self, "attention_dropout"),
            lambda: positive(self, "window_size"),
            lambda: positive(self, "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
            lambda: positive(self, "qk_pos_emb_head_dim", "v_head_dim"),
            lambda: not_negative(self, "mscale", "mscale_all_dim"),
        )


def problems(config: Config) -> Iterator[str]:
    """Name what does not go with latent attention, each with its mend; nothing without it."""
    flag, model = "--multi-latent-attention", config.model
    if not config.attention.multi_latent_attention or model.num_attention_heads is None:
        return
    refused = {
        "--group-query-attention": (model.group_query_attention, "all heads have their own keys"),
        "--kv-channels": (model.kv_channels, "heads are as --qk-head-dim and --v-head-dim say"),
        "--qk-layernorm": (
            config.attention.qk_layernorm,
            "its low-rank vectors are always normalised",
        ),
        "--attention-output-gate": (config.attention.attention_output_gate, "it has no gate"),
        "--add-qkv-bias": (model.add_qkv_bias, "it has no biases"),
        "--add-attention-output-bias": (model.add_attention_output_bias, "it has no biases"),
        "--window-size": (config.attention.window_size, "it sees all tokens before"),
        "--softmax-type learnable": (
            config.attention.softmax_type == "learnable",
            "it has no sinks",
        ),
    }
    for other, (given, reason) in refused.items():
        if given:
            yield f"{other} does not go with {flag}: {reason}: drop one"
    if not model.disable_bias_linear:
        yield f"{flag} has no biases: add --disable-bias-linear (MLPs: --add-mlp-bias)"
    if config.position.position_embedding_type == "none":
        yield f"--position-embedding-type none does not go with {flag}: use rope or yarn"
    # Not above: the options of other models must not wait for torch.
    from megatron.training.config.model_table import part_config

    parallel = config.parallel
    latent = part_config(config, "attention")
    for problem in latent.problems(
        parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        engine=parallel.cp_comm_type,
    ):
        yield f"{flag}: {problem}"
