# SPDX-License-Identifier: Apache-2.0
"""Models whose layers differ in windows or positions: SmolLM3, Ministral and CWM."""

from __future__ import annotations

from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, DENSE
from megatron.hf import attention_kinds
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.attention_kinds import plain_kinds, window_kinds
from megatron.hf.entries import ATTENTION_ENTRIES, ENDS, MLP
from megatron.hf.layer_types import layers, uniform_layers

SMOLLM3 = Architecture(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        Row("mlp_bias", "mlp.bias", read.flag(False)),
        *attention_kinds.rows(plain_kinds),
        *attention_kinds.SWITCH,
        Row("no_rope_layers", "", read.unread, attention_kinds.write_no_rope_layers),
    ),
    read_blocks=layers(uniform_layers(DENSE), attention_kinds.mixers(plain_kinds)),
    aliases=frozenset({"no_rope_layer_interval"}),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        }
    ),
)
_ALL_WINDOWS = window_kinds(attention_kinds.all_windows)
MINISTRAL = Architecture(
    model_type="ministral",
    class_name="MinistralForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *attention_kinds.rows(_ALL_WINDOWS),
    ),
    read_blocks=layers(uniform_layers(DENSE), attention_kinds.mixers(_ALL_WINDOWS)),
    defaults=MappingProxyType({"num_key_value_heads": 8, "sliding_window": 4096}),
)
_CWM_WINDOWS = window_kinds(attention_kinds.periodic_full_attention(4, offset=0))
CWM = Architecture(
    model_type="cwm",
    class_name="CwmForCausalLM",
    has_classifier=False,
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row("mlp_bias", "mlp.bias", read.flag(False)),
        *attention_kinds.rows(_CWM_WINDOWS),
        Row("bos_token_id", "", read.unread, constant(128000)),  # its class refuses null
    ),
    read_blocks=layers(uniform_layers(DENSE), attention_kinds.mixers(_CWM_WINDOWS)),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    ),
)
