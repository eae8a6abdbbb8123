# SPDX-License-Identifier: Apache-2.0
"""Models with learned positions: GPT-2, and StarCoder (GPT-BigCode).

GPT-2's files contain the weights of its projections transposed, as [inputs, outputs].
"""

from __future__ import annotations

from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, DENSE
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture, Blocks
from megatron.hf.entries import HEAD, Entry, FusedWeight, fused_weights
from megatron.hf.layer_types import layers, refuse_windows, uniform_layers
from megatron.hf.readers import ModelFields

_LAYER = "transformer.h.{layer}"


def _norm(hf_name: str, mcore_name: str) -> Entry:
    return Entry(f"{hf_name}.weight", f"{mcore_name}.weight", "h", "norm_bias")


def _inner_size(fields: ModelFields, name: str) -> int:
    return fields.count(name, 4 * fields.count_of("n_embd", "hidden_size"))


_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def _head_dim(fields: ModelFields, _: str) -> int:
    hidden, heads = (fields.count_of(name, _NAMES[name]) for name in ("n_embd", "n_head"))
    if hidden % heads:
        fields.refuse("n_head", f"it must divide n_embd {hidden}")
    return hidden // heads


def _blocks(*, transposed: bool) -> Blocks:
    """Return the entries of the blocks."""
    return {
        ATTENTION: (
            _norm(f"{_LAYER}.ln_1", "{block}.norm"),
            FusedWeight(
                f"{_LAYER}.attn.c_attn.weight",
                fused_weights("attention", ("query", "n"), ("key", "g"), ("value", "g")),
                groups="1",
                inner="h",
                biased="attention_bias",
                transposed=transposed,
            ),
            Entry(
                f"{_LAYER}.attn.c_proj.weight",
                "{block}.attention.output.weight",
                "hn",
                "attention_out_bias",
                transposed=transposed,
            ),
        ),
        DENSE: (
            _norm(f"{_LAYER}.ln_2", "{block}.norm"),
            *(
                Entry(
                    f"{_LAYER}.mlp.{hf_name}.weight",
                    f"{{block}}.mlp.{name}.weight",
                    shape,
                    "mlp_bias",
                    transposed=transposed,
                )
                for hf_name, name, shape in (("c_fc", "up", "fh"), ("c_proj", "down", "hf"))
            ),
        ),
    }


_ENDS = (
    Entry("transformer.wte.weight", "embedding.weight", "Vh"),
    _norm("transformer.ln_f", "decoder.final_norm"),
    HEAD,
)
_POSITIONS = Entry("transformer.wpe.weight", "embedding.position_embeddings.weight", "Ph")
_ROWS = (
    *rows.MODEL[1:],
    *rows.layer_norm("layer_norm_epsilon"),
    *rows.plain_mlp("activation_function"),
    Row("n_embd", "hidden_size", read.count_of("n_embd", "hidden_size")),
    Row("n_layer", "", read.unread, lambda config, _: config.num_layers),
    Row("n_head", "attention.num_attention_heads", read.count_of("n_head", _NAMES["n_head"])),
    Row(
        "n_positions",
        "max_position_embeddings",
        read.count_of("n_positions", "max_position_embeddings"),
    ),
    Row("n_inner", "mlp.ffn_hidden_size", _inner_size),
    Row("", "attention.kv_channels", _head_dim),
    Row("scale_attn_weights", "attention.", read.must_be(True), constant(True)),
    Row("add_cross_attention", "", read.must_be(False), constant(False)),
    *(
        Row("", path, constant(True))
        for path in ("attention.qkv_bias", "attention.output_bias", "mlp.bias")
    ),
    *(
        Row(name, "", read.unread, constant(0.0))
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    ),
)


def _write_activation(activation: str, config: GPTConfig) -> str:
    """Return the name of an activation; GPT-2 has an older name of the tanh approximation."""
    if activation == "gelu_tanh":
        return "gelu_new"
    return read.write_activation(activation, config)


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    has_classifier=False,
    blocks=_blocks(transposed=True),
    ends=_ENDS,
    positions=_POSITIONS,
    rows=(
        *_ROWS,
        Row("activation_function", "mlp.activation", read.activation, _write_activation),
        Row(
            "",
            "attention.num_query_groups",
            lambda fields, _: fields.count_of("n_head", _NAMES["n_head"]),
        ),
        *(
            Row(name, "attention.", read.must_be(False), constant(False))
            for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
        ),
    ),
    read_blocks=layers(uniform_layers(DENSE), names=("n_layer", _NAMES["n_layer"])),
    check=refuse_windows,
    aliases=frozenset(_NAMES.values()),
    defaults=MappingProxyType(
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        }
    ),
    other_prefix=("transformer.", ""),
)
GPT_BIGCODE = Architecture(
    model_type="gpt_bigcode",
    class_name="GPTBigCodeForCausalLM",
    blocks=_blocks(transposed=False),
    ends=_ENDS,
    positions=_POSITIONS,
    rows=(
        *_ROWS,
        Row("", "attention.num_query_groups", constant(1)),
        Row("num_key_value_heads", "attention.", read.must_be(1), read.unwritten),
        Row("multi_query", "attention.", read.must_be(True), constant(True)),
    ),
    read_blocks=layers(uniform_layers(DENSE), names=("n_layer", _NAMES["n_layer"])),
    check=refuse_windows,
    aliases=frozenset(_NAMES.values()),
    defaults=MappingProxyType(
        {
            "activation_function": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        }
    ),
)
