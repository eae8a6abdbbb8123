# SPDX-License-Identifier: Apache-2.0
"""The options of a model: its shape, attention, position embedding, experts and recurrent mixers.

An option that is a field of a core config is annotated with the path of that field in `GPTConfig`.
A field that is derived from several options has its row in model_table.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.cli.two_way_table import at, constant, negated, opposite, unless
from megatron.training.config.values import fraction, not_negative, positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Attention: dropout, masks, sinks and multi-head latent attention."""

    attention_dropout: Annotated[float, at("latent.dropout"), at("attention.dropout")] = 0.1
    """Dropout rate of attention probabilities."""
    qk_layernorm: Annotated[bool, at("attention.qk_norm")] = False
    """Normalise each query and key head before the rotary embedding. Latents are always normalised;
    with --multi-latent-attention this flag is required."""
    add_qkv_bias: bool = False
    """Keep the bias of the query, key and value projection despite --disable-bias-linear."""
    add_attention_output_bias: bool = False
    """Keep the bias of attention's output projection despite --disable-bias-linear."""
    qk_layernorm_scope: Annotated[
        Literal["head", "projection"], at("attention.qk_norm_scope", back=unless("head"))
    ] = "head"
    """What --qk-layernorm normalises: each head, with one weight for all heads, or all heads of the
    projection together (as in OLMo 2), with RMSNorm."""
    attention_output_gate: Annotated[bool, at("attention.output_gate", back=unless(False))] = False
    """Multiply the output of each head by the sigmoid of a learned projection of its input
    token."""
    window_size: int | None = None
    """Sliding window attention: number of tokens that a token attends to, itself and those right
    before it; derived: all. If a layer pattern has W blocks, only they have the window."""
    window_attn_skip_freq: str | None = None
    """Which layers have the window: N for all but every N-th layer, or for each layer a 1 with the
    window or a 0 without it, as 1,1,0 or ([1]*5+[0])*4; derived: all."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """learnable gives each query head an attention sink: a learned logit in the softmax without a
    value."""
    window_softmax_type: Literal["vanilla", "learnable"] | None = None
    """--softmax-type of the second kind of attention: of the layers with the window, if others have
    none, otherwise of the layers without rotary embeddings; derived: the same."""
    multi_latent_attention: Annotated[bool, at("latent.", back=constant(True))] = False
    """Use multi-head latent attention (MLA): queries, and keys with values, are projected through
    low-rank latents; the KV cache holds only the latent of keys and values, shared by all heads."""
    q_lora_rank: Annotated[int | None, at("latent.q_lora_rank")] = None
    """Rank of the query latent; None computes queries directly."""
    kv_lora_rank: Annotated[int, at("latent.kv_lora_rank")] = 32
    """Rank of the latent of keys and values."""
    qk_head_dim: Annotated[int, at("latent.nope_channels")] = 128
    """Features of each query and key head without rotary embedding."""
    qk_pos_emb_head_dim: Annotated[int, at("latent.rope_channels")] = 64
    """Features of each query and key head with rotary embedding; all heads share these key
    features."""
    v_head_dim: Annotated[int, at("latent.value_channels")] = 128
    """Features of each value head."""
    latent_norm_epsilon: Annotated[float | None, at("latent.norm_epsilon", back=unless(None))] = (
        None
    )
    """Term added to the mean square in the norms of latents; derived: --norm-epsilon."""
    mscale: float = 1.0
    """With yarn, scale the rotary features of queries and keys by 0.1 x this x ln(scaling factor) +
    1."""
    mscale_all_dim: float = 0.0
    """With yarn, scale all features of queries and keys, through the softmax scale, by 0.1 x this x
    ln(scaling factor) + 1; rotary features are scaled by --mscale alone."""

    def __post_init__(self) -> None:
        require_all(
            lambda: fraction(self, "attention_dropout"),
            lambda: positive(self, "window_size"),
            lambda: positive(self, "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
            lambda: positive(self, "qk_pos_emb_head_dim", "v_head_dim", "latent_norm_epsilon"),
            lambda: not_negative(self, "mscale", "mscale_all_dim"),
        )


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Gates of MLPs and experts besides --swiglu, biases of experts and norms, and factors on
    activations."""

    quick_geglu: bool = False
    """Use a gated MLP, gate * sigmoid(1.702 gate) * up, instead of GELU."""
    geglu: bool = False
    """Use a gated MLP, gelu(gate) * up, with the tanh approximation of GELU, as Gemma does."""
    glu_linear_offset: Annotated[
        float,
        at("mlp.linear_offset", back=unless(0.0)),
        at("moe.linear_offset", back=unless(0.0)),
    ] = 0.0
    """Add this number to the ungated features of a gated MLP: activation(gate) * (up + offset)."""
    activation_func_clamp_value: Annotated[
        float | None, at("mlp.clamp", back=unless(None)), at("moe.clamp", back=unless(None))
    ] = None
    """Limit the inputs of a gated MLP's activation: gate to at most this, up to at most this in
    magnitude; derived: no limit."""
    moe_add_bias: Annotated[
        bool, at("moe.bias", back=unless(False)), at("router.bias", back=unless(False))
    ] = False
    """Add biases to the projections of the experts and to the router's logits, as in gpt-oss."""
    layernorm_bias: Annotated[bool, at("norm.bias", back=unless(True))] = True
    """Give every LayerNorm a bias."""
    moe_norm_min: Annotated[float, at("router.norm_min", back=unless(0.0))] = 0.0
    """Lower bound of the sum by which the scores of a token's experts are divided, as in Ernie 4.5;
    0 = none."""
    embedding_multiplier: Annotated[float, at("multipliers.embedding", back=unless(1.0))] = 1.0
    """Multiply token embeddings by this factor, as Granite and Gemma do."""
    round_embedding_multiplier: Annotated[
        bool, at("multipliers.rounds_embedding", back=unless(False))
    ] = False
    """Round --embedding-multiplier to the dtype of the weights, as Gemma does."""
    residual_multiplier: Annotated[float, at("multipliers.residual", back=unless(1.0))] = 1.0
    """Multiply the output of each block by this factor before it is added to the residual
    stream."""
    attention_output_multiplier: Annotated[float, at("multipliers.attention", back=unless(1.0))] = (
        1.0
    )
    """Multiply the output of attention by this factor, as Falcon-H1 does."""
    mamba_output_multiplier: Annotated[float, at("multipliers.mamba", back=unless(1.0))] = 1.0
    """Multiply the output of Mamba-2 blocks by this factor, as Falcon-H1 does."""
    mlp_output_multiplier: Annotated[float, at("multipliers.mlp", back=unless(1.0))] = 1.0
    """Multiply the output of MLPs by this factor, as Falcon-H1 does."""
    mlp_gate_multiplier: Annotated[float, at("mlp.gate_multiplier", back=unless(1.0))] = 1.0
    """Multiply the gate of an MLP by this factor before its activation, as Falcon-H1 does."""
    softmax_scale: Annotated[float | None, at("attention.softmax_scale", back=unless(None))] = None
    """Factor on the attention logits; derived: 1 / sqrt(features per head)."""
    attn_logit_softcapping: Annotated[float | None, at("attention.softcap", back=unless(None))] = (
        None
    )
    """Bound the attention logits x by this c, as c tanh(x / c), before the mask; derived: no
    bound."""
    final_logit_softcapping: Annotated[
        float | None, at("multipliers.logits_softcap", back=unless(None))
    ] = None
    """Bound the logits x by this c, as c tanh(x / c), after --logit-scale; derived: no bound."""
    logit_scale: Annotated[float, at("multipliers.logits", back=unless(1.0))] = 1.0
    """Multiply the logits by this factor, as Cohere and Granite (by 1 / logits_scaling) do."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "activation_func_clamp_value"),
            lambda: not_negative(self, "moe_norm_min"),
            lambda: positive(self, "embedding_multiplier", "residual_multiplier"),
            lambda: positive(self, "softmax_scale", "logit_scale"),
            lambda: positive(self, "attn_logit_softcapping", "final_logit_softcapping"),
            lambda: positive(self, "attention_output_multiplier", "mamba_output_multiplier"),
            lambda: positive(self, "mlp_output_multiplier", "mlp_gate_multiplier"),
        )


def gate_problems(model: ModelConfig, gate: ActivationOptions) -> Iterator[str]:
    """Yield a message for each gate option that cannot be combined with the activation."""
    activations = {
        "--swiglu": model.swiglu,
        "--squared-relu": model.squared_relu,
        "--openai-gelu": model.openai_gelu,
    }
    gates = {"--quick-geglu": gate.quick_geglu, "--geglu": gate.geglu}
    for gated, is_gated in gates.items():
        for flag, is_set in activations.items():
            if is_gated and is_set:
                yield f"{gated} and {flag} are mutually exclusive: keep one"
    if all(gates.values()):
        yield "--quick-geglu and --geglu are mutually exclusive: keep one"
    if model.swiglu or any(gates.values()):
        return
    if gate.glu_linear_offset or gate.activation_func_clamp_value is not None:
        yield (
            "--glu-linear-offset and --activation-func-clamp-value need a gated MLP: add --swiglu, "
            "--geglu or --quick-geglu"
        )


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture of experts: an fp32 router sends each token to a few experts."""

    num_experts: Annotated[int | None, at("moe.num_experts")] = None
    """Number of experts per MoE layer."""
    moe_layer_freq: str | None = None
    """Which layers have experts: N for every N-th layer, starting with the first, or a 1 or 0 for
    each layer as 0,1,1 or [0]*1+[1]*2; derived: from --hybrid-layer-pattern, else all layers."""
    moe_ffn_hidden_size: int | None = None
    """Inner width of each expert, in features; derived: --ffn-hidden-size."""
    moe_expert_capacity_factor: Annotated[
        float | None, at("moe.capacity_factor", back=unless(None))
    ] = None
    """Capacity of each expert as a multiple of the even share of a rank's tokens in a microbatch;
    tokens beyond it are dropped; None drops none."""
    moe_token_drop_policy: Annotated[
        Literal["probs", "position"], at("moe.drop_policy", back=unless("probs"))
    ] = "probs"
    """Which tokens an expert at capacity keeps: those with the highest routing weight, or the
    first."""
    moe_shared_expert_intermediate_size: Annotated[int | None, at("moe.shared_ffn_hidden_size")] = (
        None
    )
    """Intermediate size of the shared expert, an MLP that every token passes through."""
    moe_shared_expert_gate: Annotated[bool, at("moe.shared_gate")] = False
    """Multiply the shared expert's output by the sigmoid of a learned projection of its input
    token."""
    moe_router_topk: Annotated[int, at("router.topk")] = 2
    """Number of experts that each token is routed to."""
    moe_router_score_function: Annotated[
        Literal["softmax", "sigmoid"], at("router.score_function")
    ] = "softmax"
    """Score function of the router's logits: softmax over all experts, or a sigmoid per expert."""
    moe_router_pre_softmax: Annotated[bool, at("router.normalize", to=negated, back=opposite)] = (
        False
    )
    """Weight the selected experts by their scores as they are, without normalising the scores of
    the selected experts to sum to 1."""
    moe_router_num_groups: Annotated[int | None, at("router.num_groups")] = None
    """Number of expert groups; a token is routed to experts of a few groups only."""
    moe_router_group_topk: Annotated[int | None, at("router.group_topk")] = None
    """Number of groups that each token selects, by the sum of the
    --moe-router-group-candidates best scores in the group."""
    moe_router_group_candidates: int | None = None
    """Number of best scores in a group whose sum ranks it; derived: topk / --moe-router-group-topk,
    at least 1."""
    moe_router_topk_scaling_factor: float | None = None
    """Scale the selected experts' weights by this factor, after normalisation; derived: none."""
    moe_router_enable_expert_bias: Annotated[bool, at("router.expert_bias")] = False
    """Add a bias per expert to its score when selecting experts (auxiliary-loss-free load
    balancing); every step updates the bias towards an even load."""
    moe_router_bias_update_rate: Annotated[
        float, at("router.bias_update_rate", back=unless(0.001))
    ] = 1e-3
    """Amount added to the bias of an expert with fewer tokens than the mean, and subtracted if it
    has more, in every step."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "aux_loss"
    """What the auxiliary loss balances: the load over all tokens of a microbatch, or within each
    sequence; its coefficient is --moe-aux-loss-coeff."""
    moe_aux_loss_coeff: Annotated[float, at("router.aux_loss_coeff", back=unless(0.0))] = 0.0
    """Coefficient of the load-balancing auxiliary loss; 0 disables it."""
    moe_z_loss_coeff: Annotated[float, at("router.z_loss_coeff", back=unless(0.0))] = 0.0
    """Coefficient of the router z-loss, the mean squared log-sum-exp of its logits; 0 disables
    it."""
    moe_input_jitter_eps: Annotated[float, at("router.jitter", back=unless(0.0))] = 0.0
    """Jitter: multiply the router's input by random numbers in [1 - eps, 1 + eps] in training."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "num_experts", "moe_ffn_hidden_size"),
            lambda: positive(
                self, "moe_expert_capacity_factor", "moe_shared_expert_intermediate_size"
            ),
            lambda: positive(self, "moe_router_topk", "moe_router_topk_scaling_factor"),
            lambda: positive(self, "moe_router_num_groups", "moe_router_group_topk"),
            lambda: positive(self, "moe_router_group_candidates"),
            lambda: positive(self, "moe_router_bias_update_rate"),
            lambda: not_negative(
                self, "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"
            ),
        )


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Layer pattern of hybrid models, and their gated delta net (G), Mamba-2 (M) and short
    convolution (C) blocks."""

    hybrid_layer_pattern: str | None = None
    """One symbol per block: * attention, + latent attention, G gated delta net, M Mamba-2, C gated
    short convolution, - MLP, E experts; ( ) enclose parallel blocks, which have one norm and whose
    outputs are summed; | separates pipeline stages; each / starts the blocks of a multi-token
    prediction depth. A GPT has *- or *E for each layer; any other pattern is for
    pretrain_hybrid."""
    linear_num_key_heads: Annotated[int, at("delta_net.num_key_heads")] = 16
    """Number of query and key heads of a gated delta net."""
    linear_num_value_heads: Annotated[int, at("delta_net.num_value_heads")] = 32
    """Number of value heads of a gated delta net, each with a state and gates; several share a key
    head."""
    linear_key_head_dim: Annotated[int, at("delta_net.key_channels")] = 128
    """Features of each query and key head of a gated delta net."""
    linear_value_head_dim: Annotated[int, at("delta_net.value_channels")] = 128
    """Features of each value head of a gated delta net."""
    linear_conv_kernel_dim: Annotated[int, at("delta_net.conv_width")] = 4
    """Kernel width of the gated delta net's causal convolution, in tokens."""
    mamba_num_heads: int | None = None
    """Number of heads of a Mamba-2 block; derived: 2 x hidden size / --mamba-head-dim."""
    mamba_head_dim: Annotated[int, at("mamba.head_channels")] = 64
    """Features of each Mamba-2 head."""
    mamba_state_dim: Annotated[int, at("mamba.state_channels")] = 128
    """State size: rows of each head's state, which has a column for every feature of the head."""
    mamba_num_groups: Annotated[int, at("mamba.num_groups")] = 8
    """Number of groups of Mamba-2 heads; the heads of a group share B and C."""
    mamba_norm_groups: int | None = None
    """Groups of features normalised together after the gate; derived: --mamba-num-groups."""
    mamba_conv_kernel_dim: Annotated[int, at("mamba.conv_width")] = 4
    """Kernel width of the Mamba-2 block's causal convolution, in tokens."""
    mamba_conv_bias: Annotated[bool, at("mamba.conv_bias")] = True
    """Add a bias to the Mamba-2 block's convolution."""
    add_mamba_bias: Annotated[bool, at("mamba.bias")] = False
    """Add a bias to both projections of a Mamba-2 block."""
    mamba_dt_limit: tuple[float, ...] | None = None
    """MIN [MAX]: bounds of the Mamba-2 time step dt; derived: 0 and none."""
    mamba_norm: Annotated[bool, at("mamba.norm")] = True
    """Normalise the gated output of a Mamba-2 block."""
    mamba_projection_multipliers: Annotated[
        tuple[float, ...] | None, at("mamba.multipliers", back=unless(None))
    ] = None
    """Multiply the projected gate, x, B, C and dt of a Mamba-2 block by these five factors, as
    Falcon-H1 does; derived: 1."""
    short_conv_kernel_dim: Annotated[int, at("short_conv.conv_width")] = 3
    """Kernel width of a short convolution block, in tokens."""
    add_short_conv_bias: Annotated[bool, at("short_conv.bias")] = False
    """Add a bias to the convolution and to both projections of a short convolution block."""

    def __post_init__(self) -> None:
        limits = self.mamba_dt_limit or (0.0,)
        require_all(
            lambda: positive(self, "linear_num_key_heads", "linear_num_value_heads"),
            lambda: positive(self, "linear_key_head_dim", "linear_value_head_dim"),
            lambda: positive(self, "linear_conv_kernel_dim", "mamba_conv_kernel_dim"),
            lambda: positive(self, "mamba_num_heads", "mamba_head_dim", "mamba_state_dim"),
            lambda: positive(self, "mamba_num_groups", "mamba_norm_groups"),
            lambda: positive(self, "short_conv_kernel_dim"),
            lambda: require(
                len(limits) <= 2 and 0.0 <= limits[0] <= limits[-1],
                f"--mamba-dt-limit {' '.join(map(str, limits))}: give the least dt, from 0 up, and "
                "optionally the largest",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the transformer."""

    num_layers: Annotated[int, at("num_layers")]
    """Number of transformer layers, each with one attention and one MLP block. For a hybrid, the
    number of blocks; derived from --hybrid-layer-pattern if it is given."""
    hidden_size: Annotated[int, at("hidden_size")]
    """Hidden size: features of the residual stream."""
    num_attention_heads: Annotated[
        int | None, at("latent.num_attention_heads"), at("attention.num_attention_heads")
    ] = None
    """Number of query heads; required by every model with attention."""
    ffn_hidden_size: Annotated[int | None, at("mlp.ffn_hidden_size")] = None
    """Intermediate size of the MLP; derived: 4 x hidden size, with --swiglu 8/3 x hidden size
    rounded down to a multiple of 64."""
    group_query_attention: Annotated[bool, at("attention.", back=constant(True))] = False
    """Use grouped-query attention: several query heads share a key and value head; needs
    --num-query-groups."""
    num_query_groups: Annotated[int | None, at("attention.num_query_groups")] = None
    """Number of key and value heads with --group-query-attention (1 = multi-query attention)."""
    kv_channels: Annotated[int | None, at("attention.kv_channels")] = None
    """Features per attention head; derived: hidden size / number of heads."""
    max_position_embeddings: int | None = None
    """Maximum sequence length of the model, in tokens; derived: the sequence length."""
    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], at("norm.kind")] = "LayerNorm"
    """Normalisation of every block and of the final norm."""
    norm_epsilon: Annotated[float, at("norm.epsilon")] = 1e-5
    """Term added to the variance in every norm."""
    apply_layernorm_1p: Annotated[bool, at("norm.zero_centered", back=unless(False))] = False
    """Store norm weights as weight - 1 (zero-centred); the norm after a recurrence keeps a plain
    weight."""
    norm_placement: Annotated[
        Literal["pre", "post", "both"], at("norm.placement", back=unless("pre"))
    ] = "pre"
    """What each block normalises: pre its input, post its output before it is added to the residual
    stream, or both."""
    swiglu: bool = False
    """Use a gated MLP, silu(gate) * up, instead of GELU."""
    squared_relu: bool = False
    """Use squared ReLU instead of GELU in the MLP."""
    openai_gelu: bool = False
    """Use the tanh approximation of GELU in the MLP, as GPT-2 does."""
    disable_bias_linear: bool = False
    """Remove the bias of every linear layer."""
    add_mlp_bias: bool = False
    """Keep the biases of both MLP projections despite --disable-bias-linear."""
    untie_embeddings_and_output_weights: Annotated[bool, at("tied", to=negated, back=opposite)] = (
        False
    )
    """Give the output head its own weight instead of sharing the embedding's."""
    hidden_dropout: Annotated[float, at("hidden_dropout")] = 0.1
    """Dropout probability of the embedding and of every block's output."""
    init_method_std: Annotated[float, at("init_std")] = 0.02
    """Standard deviation of initial weights; output projections use this / sqrt(number of blocks),
    with two blocks per layer."""

    @property
    def inner_features(self) -> int:
        """Intermediate size of the MLP, explicit or derived."""
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
                self.swiglu + self.squared_relu + self.openai_gelu <= 1,
                "--swiglu, --squared-relu and --openai-gelu are mutually exclusive: keep one",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Position embedding."""

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = (
        "learned_absolute"
    )
    """Position embedding: learned_absolute adds one of --max-position-embeddings learned vectors to
    each token's embedding; rope rotates queries and keys; yarn is rope with frequencies scaled by
    the --yarn-* options."""
    rotary_base: Annotated[float, at("rope.base")] = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float, at("rope.percent")] = 1.0
    """Fraction of each head's features that is rotated, in (0, 1]."""
    rotary_interleaved: Annotated[bool, at("rope.interleaved", back=unless(False))] = False
    """Rotate pairs of adjacent features instead of features half a head apart."""
    no_rope_freq: str | None = None
    """Which layers have no rotary embeddings: N for every N-th layer, or for each layer a 1 without
    them or a 0 with them, as 0,0,1 or ([0]*3+[1])*4; derived: none."""
    window_rotary_base: float | None = None
    """--rotary-base of the layers with the window, if others have none; derived: the same."""
    window_rope_scaling: Literal["same", "unscaled"] = "same"
    """Scaling of the rotary frequencies of the layers with the window, if others have none:
    unscaled applies the scaling to the other layers only."""
    rotary_query_scale_beta: Annotated[float, at("rope.query_scale_beta", back=unless(0.0))] = 0.0
    """Multiply the queries of position p by 1 + this x ln(1 + floor(p / L)), L being
    --rotary-query-scale-length."""
    rotary_query_scale_length: Annotated[int, at("rope.query_scale_length", back=unless(8192))] = (
        8192
    )
    """Tokens after which --rotary-query-scale-beta scales queries, and between its steps."""

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.position_embedding_type in ("rope", "yarn")

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "rotary_base", "window_rotary_base"),
            lambda: positive(self, "rotary_query_scale_length"),
            lambda: not_negative(self, "rotary_query_scale_beta"),
            lambda: require(
                0.0 < self.rotary_percent <= 1.0,
                f"--rotary-percent is {self.rotary_percent}: it must lie in (0, 1]",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RopeScalingOptions:
    """Scaling of rotary frequencies for contexts longer than in pretraining."""

    rotary_seq_len_interpolation_factor: Annotated[float | None, at("linear.factor")] = None
    """Divide positions by this factor (linear scaling)."""
    use_rope_scaling: Annotated[bool, at("llama3.", back=constant(True))] = False
    """Scale low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: Annotated[float, at("llama3.factor")] = 8.0
    """Factor of --use-rope-scaling."""
    rope_scaling_original_max_position: Annotated[int, at("llama3.original_max_position")] = 8192
    """Original context length, in tokens (--use-rope-scaling)."""
    rope_scaling_low_freq_factor: Annotated[float, at("llama3.low_freq_factor")] = 1.0
    """Wavelengths above original context / this are scaled fully (--use-rope-scaling)."""
    rope_scaling_high_freq_factor: Annotated[float, at("llama3.high_freq_factor")] = 4.0
    """Wavelengths below original context / this are not scaled (--use-rope-scaling)."""
    yarn_rotary_scaling_factor: Annotated[float, at("yarn.factor")] = 1.0
    """Context extension factor (yarn)."""
    yarn_original_max_position_embeddings: Annotated[int, at("yarn.original_max_position")] = 4096
    """Original context length, in tokens (yarn)."""
    yarn_beta_fast: Annotated[float, at("yarn.beta_fast")] = 32.0
    """Features with more rotations than this over the original context are not scaled (yarn)."""
    yarn_beta_slow: Annotated[float, at("yarn.beta_slow")] = 1.0
    """Features with fewer rotations than this over the original context are scaled fully (yarn)."""
    yarn_attention_factor: float | None = None
    """Factor on cosine and sine (yarn); derived: 0.1 x ln(scaling factor) + 1."""
    no_yarn_correction_range_round_to_int: Annotated[
        bool, at("yarn.truncate", to=negated, back=opposite)
    ] = False
    """Between features that are scaled and features that are not, do not round the bounds to whole
    features (yarn)."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "rotary_seq_len_interpolation_factor"),
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
        )


def rope_scaling_problems(position: PositionConfig, scaling: RopeScalingOptions) -> Iterator[str]:
    """Yield a message for each problem of the scaling of rotary embeddings."""
    scalings = {
        "--use-rope-scaling": scaling.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": (
            scaling.rotary_seq_len_interpolation_factor is not None
        ),
        "--position-embedding-type yarn": position.position_embedding_type == "yarn",
    }
    chosen = [flag for flag, on in scalings.items() if on]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} are mutually exclusive: keep one"
    low, high = scaling.rope_scaling_low_freq_factor, scaling.rope_scaling_high_freq_factor
    if low >= high:
        yield (
            f"--rope-scaling-low-freq-factor {low} must be below --rope-scaling-high-freq-factor "
            f"{high}: change one"
        )
    slow, fast = scaling.yarn_beta_slow, scaling.yarn_beta_fast
    if slow > fast:
        yield f"--yarn-beta-slow {slow} must not be above --yarn-beta-fast {fast}: change one"
