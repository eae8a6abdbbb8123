# SPDX-License-Identifier: Apache-2.0
"""The model and its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import fraction, positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the transformer."""

    num_layers: int
    """Number of transformer layers; a layer is one attention and one MLP block. Of a hybrid, the
    number of blocks; derived where --hybrid-layer-pattern is given."""
    hidden_size: int
    """Width of the residual stream, in features."""
    num_attention_heads: int | None = None
    """Number of query heads; needed by every model with attention."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP, in features; derived: 4 x hidden, with --swiglu 8/3 x hidden rounded
    down to a multiple of 64."""
    group_query_attention: bool = False
    """Let several query heads share one key and value head; needs --num-query-groups."""
    num_query_groups: int | None = None
    """Number of key and value heads with --group-query-attention (1 = multi-query attention)."""
    kv_channels: int | None = None
    """Features per attention head; derived: hidden size / heads."""
    max_position_embeddings: int | None = None
    """Longest sequence the model is meant for, in tokens; derived: the sequence length."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Which normalisation every block and the final norm use."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside every norm."""
    apply_layernorm_1p: bool = False
    """Store the weight of every norm as its distance from one; the norm behind a recurrence keeps a
    plain weight."""
    swiglu: bool = False
    """Use a gated MLP, silu(gate) * up, instead of GELU."""
    squared_relu: bool = False
    """Use an MLP with the square of relu instead of GELU."""
    disable_bias_linear: bool = False
    """Leave the bias out of every linear layer."""
    add_qkv_bias: bool = False
    """Keep a bias on the query, key and value projection even with --disable-bias-linear."""
    add_attention_output_bias: bool = False
    """Keep a bias on attention's output projection even with --disable-bias-linear."""
    add_mlp_bias: bool = False
    """Keep a bias on both projections of the MLP even with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output head a weight of its own instead of the embedding's."""
    hidden_dropout: float = 0.1
    """Dropout rate of the embedding and of every block's output."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; output projections use it / sqrt(blocks), of
    which a layer has two."""

    @property
    def inner_features(self) -> int:
        """Inner width of the MLP, derived where it is not given."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return max(64, self.hidden_size * 8 // 3 // 64 * 64)
        return 4 * self.hidden_size

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(
                self, "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"
            ),
            lambda: positive(self, "num_query_groups", "kv_channels", "max_position_embeddings"),
            lambda: positive(self, "norm_epsilon", "init_method_std"),
            lambda: fraction(self, "hidden_dropout"),
            lambda: require(
                not (self.swiglu and self.squared_relu),
                "--swiglu and --squared-relu exclude each other: keep one",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Rotary position embedding."""

    position_embedding_type: Literal["rope", "yarn", "none"] = "rope"
    """How positions enter attention; yarn is rope with its frequencies stretched by --yarn-*."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Share of each head's features that is rotated, in (0, 1]."""
    rotary_interleaved: bool = False
    """Rotate pairs of neighbouring features instead of features half a head apart."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide positions by this number (linear scaling)."""
    use_rope_scaling: bool = False
    """Scale the low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""
    rope_scaling_original_max_position: int = 8192
    """Context length, in tokens, the frequencies were first trained at (--use-rope-scaling)."""
    rope_scaling_low_freq_factor: float = 1.0
    """Wavelengths above the original context / this are stretched fully (--use-rope-scaling)."""
    rope_scaling_high_freq_factor: float = 4.0
    """Wavelengths below the original context / this are kept (--use-rope-scaling)."""
    yarn_rotary_scaling_factor: float = 1.0
    """How many times longer than the original the context becomes (yarn)."""
    yarn_original_max_position_embeddings: int = 4096
    """Context length, in tokens, the frequencies were first trained at (yarn)."""
    yarn_beta_fast: float = 32.0
    """Features turning more often than this over the original context are kept (yarn)."""
    yarn_beta_slow: float = 1.0
    """Features turning less often than this over the original context are stretched fully
    (yarn)."""
    yarn_attention_factor: float | None = None
    """Factor on cosine and sine (yarn); derived: 0.1 x ln(scaling factor) + 1."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "rotary_base", "rotary_seq_len_interpolation_factor"),
            lambda: positive(self, "rope_scaling_factor", "rope_scaling_original_max_position"),
            lambda: positive(
                self, "yarn_original_max_position_embeddings", "yarn_attention_factor"
            ),
            lambda: positive(self, "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
            lambda: positive(self, "yarn_beta_fast", "yarn_beta_slow"),
            lambda: require(
                self.yarn_rotary_scaling_factor >= 1.0,
                f"--yarn-rotary-scaling-factor is {self.yarn_rotary_scaling_factor}: it must be at "
                "least 1",
            ),
            lambda: require(
                0.0 < self.rotary_percent <= 1.0,
                f"--rotary-percent is {self.rotary_percent}: it must lie in (0, 1]",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer and vocabulary."""

    tokenizer_type: Literal["hf", "sentencepiece", "byte", "null"] | None = None
    """Kind of tokenizer; derived: when --tokenizer-model is given, sentencepiece for a .model, else
    hf."""
    tokenizer_model: str | None = None
    """Path of a tokenizer.json, of a folder that holds one, or of a SentencePiece .model."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """The token files hold no special tokens that the tokenizer adds around a text, such as BOS,
    and prompts get none."""
    vocab_size: int | None = None
    """Size of the vocabulary, in tokens, before padding; derived: the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor parallel size; padding takes no
    part in the maths."""

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "make_vocab_size_divisible_by")
