# SPDX-License-Identifier: Apache-2.0
"""The options of a model: its shape, attention, experts, recurrent mixers and vocabulary.

An option that is a field of a config of the core is annotated with that field's path in
`GPTConfig`. One that is derived from several options has its row in model_table.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.cli.two_way_table import at, constant, negated, opposite, unless
from megatron.training.config.values import fraction, not_negative, positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a token attends to and how; multi-head latent attention."""

    attention_dropout: Annotated[float, at("latent.dropout"), at("attention.dropout")] = 0.1
    """Dropout rate of attention probabilities."""
    qk_layernorm: Annotated[bool, at("attention.qk_norm")] = False
    """Normalise each query and key head before the rotary embedding. Latents are always normalised,
    and a command line with --multi-latent-attention has to say so by this flag."""
    attention_output_gate: Annotated[bool, at("attention.output_gate", back=unless(False))] = False
    """Multiply what each head gives by the sigmoid of a learned product with the token."""
    window_size: Annotated[int | None, at("attention.window", back=unless(None))] = None
    """Tokens that a token attends to, itself and those right before it; derived: all of them."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """learnable gives each query head a learned logit that takes attention and has no value, a
    sink."""
    multi_latent_attention: Annotated[bool, at("latent.", back=constant(True))] = False
    """Pass queries, and keys with values, through vectors of low rank; a cache keeps those of keys
    and values alone, for all heads together."""
    q_lora_rank: Annotated[int | None, at("latent.q_lora_rank")] = None
    """Features of a token's low-rank query vector; none computes queries directly."""
    kv_lora_rank: Annotated[int, at("latent.kv_lora_rank")] = 32
    """Features of a token's low-rank vector of keys and values."""
    qk_head_dim: Annotated[int, at("latent.nope_channels")] = 128
    """Features of a head's query and key that do not rotate."""
    qk_pos_emb_head_dim: Annotated[int, at("latent.rope_channels")] = 64
    """Features of a head's query and key that rotate; those of keys are the same for all heads."""
    v_head_dim: Annotated[int, at("latent.value_channels")] = 128
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


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture of experts: each expert sees the tokens that a router, in fp32, sends to it."""

    num_experts: Annotated[int | None, at("moe.num_experts")] = None
    """Experts of each layer that has some."""
    moe_layer_freq: str | None = None
    """Which layers have experts: N for every N-th from the first on, or a 1 or 0 for each layer as
    0,1,1 or [0]*1+[1]*2; derived: what --hybrid-layer-pattern says, else all layers."""
    moe_ffn_hidden_size: int | None = None
    """Inner width of each expert, in features; derived: --ffn-hidden-size."""
    moe_expert_capacity_factor: Annotated[
        float | None, at("moe.capacity_factor", back=unless(None))
    ] = None
    """An expert takes at most this times the even share of a rank's tokens of a microbatch, the
    rest are dropped there; none drops none."""
    moe_token_drop_policy: Annotated[
        Literal["probs", "position"], at("moe.drop_policy", back=unless("probs"))
    ] = "probs"
    """Which tokens an expert at its capacity keeps: those of the highest weight, or the first."""
    moe_shared_expert_intermediate_size: Annotated[int | None, at("moe.shared_ffn_hidden_size")] = (
        None
    )
    """Inner width, in features, of an MLP that every token goes through as well."""
    moe_shared_expert_gate: Annotated[bool, at("moe.shared_gate")] = False
    """Multiply that MLP's output by the sigmoid of a learned product with the token."""
    moe_router_topk: Annotated[int, at("router.topk")] = 2
    """Experts of a token."""
    moe_router_score_function: Annotated[
        Literal["softmax", "sigmoid"], at("router.score_function")
    ] = "softmax"
    """What makes scores of the router's logits: softmax over all experts, or sigmoid of each."""
    moe_router_pre_softmax: Annotated[bool, at("router.normalize", to=negated, back=opposite)] = (
        False
    )
    """Weigh the chosen experts by their scores as they are, of softmax over all experts or of
    sigmoid, instead of dividing these by their sum."""
    moe_router_num_groups: Annotated[int | None, at("router.num_groups")] = None
    """Groups of experts; a token finds its experts within some of them only."""
    moe_router_group_topk: Annotated[int | None, at("router.group_topk")] = None
    """Groups of a token: those whose best experts, topk / this many, have the highest sum."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor of the chosen experts' weights, after they sum to 1; derived: none."""
    moe_router_enable_expert_bias: Annotated[bool, at("router.expert_bias")] = False
    """Give each expert a bias that is added to its score where experts are chosen; every step moves
    it towards even load, without a loss."""
    moe_router_bias_update_rate: Annotated[
        float, at("router.bias_update_rate", back=unless(0.001))
    ] = 1e-3
    """What a step adds to the bias of an expert with fewer tokens than the mean, and takes from one
    with more."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "aux_loss"
    """What the auxiliary loss balances: the load over all tokens of a microbatch, or over those of
    each sequence; it has the coefficient --moe-aux-loss-coeff."""
    moe_aux_loss_coeff: Annotated[float, at("router.aux_loss_coeff", back=unless(0.0))] = 0.0
    """Coefficient of the auxiliary loss that balances load; 0 leaves it out."""
    moe_z_loss_coeff: Annotated[float, at("router.z_loss_coeff", back=unless(0.0))] = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits; 0 leaves it out."""
    moe_input_jitter_eps: Annotated[float, at("router.jitter", back=unless(0.0))] = 0.0
    """Multiply what the router reads by random numbers in [1 - eps, 1 + eps] in training."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "num_experts", "moe_ffn_hidden_size"),
            lambda: positive(
                self, "moe_expert_capacity_factor", "moe_shared_expert_intermediate_size"
            ),
            lambda: positive(self, "moe_router_topk", "moe_router_topk_scaling_factor"),
            lambda: positive(self, "moe_router_num_groups", "moe_router_group_topk"),
            lambda: positive(self, "moe_router_bias_update_rate"),
            lambda: not_negative(
                self, "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"
            ),
        )


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """The layer pattern, and its gated delta nets (G) and Mamba-2 blocks (M)."""

    hybrid_layer_pattern: str | None = None
    """One symbol a block: * attention, + latent attention, G gated delta net, M Mamba-2, - MLP, E
    experts; | where pipeline stages are cut; behind each / the blocks of one depth of multi-token
    prediction. *- or *E for each layer is a GPT; any other pattern is for pretrain_hybrid."""
    linear_num_key_heads: Annotated[int, at("delta_net.num_key_heads")] = 16
    """Heads of queries and keys of a gated delta net."""
    linear_num_value_heads: Annotated[int, at("delta_net.num_value_heads")] = 32
    """Heads of values, states and gates of a gated delta net; several share a key head."""
    linear_key_head_dim: Annotated[int, at("delta_net.key_channels")] = 128
    """Features of each of its query and key heads."""
    linear_value_head_dim: Annotated[int, at("delta_net.value_channels")] = 128
    """Features of each of its value heads."""
    linear_conv_kernel_dim: Annotated[int, at("delta_net.conv_width")] = 4
    """Tokens that its causal convolution sees."""
    mamba_num_heads: int | None = None
    """Heads of a Mamba-2 block; derived: 2 x hidden size / --mamba-head-dim."""
    mamba_head_dim: Annotated[int, at("mamba.head_channels")] = 64
    """Features of each of its heads."""
    mamba_state_dim: Annotated[int, at("mamba.state_channels")] = 128
    """Rows of each head's state, which has a column for every feature of the head."""
    mamba_num_groups: Annotated[int, at("mamba.num_groups")] = 8
    """Groups of its heads; those of a group share what they write to their states and read by."""
    mamba_norm_groups: int | None = None
    """Groups of features that are normalised together behind the gate; derived: --mamba-num-groups.
    """
    mamba_conv_kernel_dim: Annotated[int, at("mamba.conv_width")] = 4
    """Tokens that its causal convolution sees."""
    mamba_conv_bias: Annotated[bool, at("mamba.conv_bias")] = True
    """Give that convolution a bias."""
    add_mamba_bias: Annotated[bool, at("mamba.bias")] = False
    """Give both projections of a Mamba-2 block a bias."""
    mamba_dt_limit: tuple[float, ...] | None = None
    """LEAST [MOST]: bounds of the step dt of a token; derived: 0 and none."""

    def __post_init__(self) -> None:
        limits = self.mamba_dt_limit or (0.0,)
        require_all(
            lambda: positive(self, "linear_num_key_heads", "linear_num_value_heads"),
            lambda: positive(self, "linear_key_head_dim", "linear_value_head_dim"),
            lambda: positive(self, "linear_conv_kernel_dim", "mamba_conv_kernel_dim"),
            lambda: positive(self, "mamba_num_heads", "mamba_head_dim", "mamba_state_dim"),
            lambda: positive(self, "mamba_num_groups", "mamba_norm_groups"),
            lambda: require(
                len(limits) <= 2 and 0.0 <= limits[0] <= limits[-1],
                f"--mamba-dt-limit {' '.join(map(str, limits))}: give the least dt, from 0 up, and "
                "the most or nothing",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the transformer."""

    num_layers: Annotated[int, at("num_layers")]
    """Number of transformer layers; a layer is one attention and one MLP block. Of a hybrid, the
    number of blocks; derived where --hybrid-layer-pattern is given."""
    hidden_size: Annotated[int, at("hidden_size")]
    """Width of the residual stream, in features."""
    num_attention_heads: Annotated[
        int | None, at("latent.num_attention_heads"), at("attention.num_attention_heads")
    ] = None
    """Number of query heads; needed by every model with attention."""
    ffn_hidden_size: Annotated[int | None, at("mlp.ffn_hidden_size")] = None
    """Inner width of the MLP, in features; derived: 4 x hidden, with --swiglu 8/3 x hidden rounded
    down to a multiple of 64."""
    group_query_attention: Annotated[bool, at("attention.", back=constant(True))] = False
    """Let several query heads share one key and value head; needs --num-query-groups."""
    num_query_groups: Annotated[int | None, at("attention.num_query_groups")] = None
    """Number of key and value heads with --group-query-attention (1 = multi-query attention)."""
    kv_channels: Annotated[int | None, at("attention.kv_channels")] = None
    """Features per attention head; derived: hidden size / heads."""
    max_position_embeddings: int | None = None
    """Longest sequence the model is meant for, in tokens; derived: the sequence length."""
    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], at("norm.kind")] = "LayerNorm"
    """Which normalisation every block and the final norm use."""
    norm_epsilon: Annotated[float, at("norm.epsilon")] = 1e-5
    """Added to the variance inside every norm."""
    apply_layernorm_1p: Annotated[bool, at("norm.zero_centered", back=unless(False))] = False
    """Store the weight of every norm as its distance from one; the norm behind a recurrence keeps a
    plain weight."""
    swiglu: Annotated[bool, at("mlp.gated"), at("moe.gated")] = False
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
    untie_embeddings_and_output_weights: Annotated[bool, at("tied", to=negated, back=opposite)] = (
        False
    )
    """Give the output head a weight of its own instead of the embedding's."""
    hidden_dropout: Annotated[float, at("hidden_dropout")] = 0.1
    """Dropout rate of the embedding and of every block's output."""
    init_method_std: Annotated[float, at("init_std")] = 0.02
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
    """Position embedding."""

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = (
        "learned_absolute"
    )
    """How positions enter: learned_absolute adds one of --max-position-embeddings learned vectors
    to each token's embedding; rope rotates queries and keys; yarn is rope with its frequencies
    stretched by --yarn-*."""
    rotary_base: Annotated[float, at("rope.base")] = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float, at("rope.percent")] = 1.0
    """Share of each head's features that is rotated, in (0, 1]."""
    rotary_interleaved: Annotated[bool, at("rope.interleaved", back=unless(False))] = False
    """Rotate pairs of neighbouring features instead of features half a head apart."""
    rotary_seq_len_interpolation_factor: Annotated[float | None, at("linear.factor")] = None
    """Divide positions by this number (linear scaling)."""
    use_rope_scaling: Annotated[bool, at("llama3.", back=constant(True))] = False
    """Scale the low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: Annotated[float, at("llama3.factor")] = 8.0
    """Factor of --use-rope-scaling."""
    rope_scaling_original_max_position: Annotated[int, at("llama3.original_max_position")] = 8192
    """Context length, in tokens, the frequencies were first trained at (--use-rope-scaling)."""
    rope_scaling_low_freq_factor: Annotated[float, at("llama3.low_freq_factor")] = 1.0
    """Wavelengths above the original context / this are stretched fully (--use-rope-scaling)."""
    rope_scaling_high_freq_factor: Annotated[float, at("llama3.high_freq_factor")] = 4.0
    """Wavelengths below the original context / this are kept (--use-rope-scaling)."""
    yarn_rotary_scaling_factor: Annotated[float, at("yarn.factor")] = 1.0
    """How many times longer than the original the context becomes (yarn)."""
    yarn_original_max_position_embeddings: Annotated[int, at("yarn.original_max_position")] = 4096
    """Context length, in tokens, the frequencies were first trained at (yarn)."""
    yarn_beta_fast: Annotated[float, at("yarn.beta_fast")] = 32.0
    """Features turning more often than this over the original context are kept (yarn)."""
    yarn_beta_slow: Annotated[float, at("yarn.beta_slow")] = 1.0
    """Features turning less often than this over the original context are stretched fully
    (yarn)."""
    yarn_attention_factor: float | None = None
    """Factor on cosine and sine (yarn); derived: 0.1 x ln(scaling factor) + 1."""

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.position_embedding_type in ("rope", "yarn")

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

    tokenizer_type: Literal["hf", "sentencepiece", "tiktoken", "byte", "null"] | None = None
    """Kind of tokenizer; derived: when --tokenizer-model is given, sentencepiece for a .model,
    tiktoken for a .tiktoken, else hf."""
    tokenizer_model: str | None = None
    """Path of a tokenizer.json, of a folder that holds one, of a vocab.json, of a SentencePiece
    .model, or of a vocabulary of tiktoken: Megatron's JSON, or ranks by line."""
    merge_file: str | None = None
    """Merges of a vocab.json, which must be beside it: gpt2-merges.txt beside gpt2-vocab.json."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """The token files hold no special tokens that the tokenizer adds around a text, such as BOS,
    and prompts get none."""
    tiktoken_pattern: Literal["v1", "v2", "llama3"] | None = None
    """Where --tokenizer-type tiktoken cuts texts before it merges; derived: v2 for Megatron's JSON,
    llama3, which is GPT-4's too, for ranks by line."""
    tiktoken_num_special_tokens: int | None = None
    """Ids that --tokenizer-type tiktoken keeps for special tokens, in front of the ranks of
    Megatron's JSON, after ranks by line; derived: 1000, or as many as are named."""
    tiktoken_special_tokens: tuple[str, ...] | None = None
    """Names of the first of these ids; derived: unk, s, /s, mask, pad, cls and sep in <> for
    Megatron's JSON, none for ranks by line."""
    vocab_size: int | None = None
    """Size of the vocabulary, in tokens, before padding; derived: the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor parallel size; padding takes no
    part in the maths."""

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "make_vocab_size_divisible_by")
