# SPDX-License-Identifier: Apache-2.0
"""Command R (Cohere and Cohere 2): parallel attention and MLP after one LayerNorm without bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, DENSE
from megatron.hf import attention_kinds
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.attention_kinds import AttentionKind, window_kinds
from megatron.hf.entries import ATTENTION_ENTRIES, ENDS, MLP
from megatron.hf.fields import Fields
from megatron.hf.layer_types import layers, refuse_windows, uniform_layers


def _parallel(read_blocks: Callable[[Fields], str], fields: Fields) -> str:
    """Return the layers of a mixer and an MLP, each pair of blocks in parallel."""
    blocks = read_blocks(fields)
    return "".join(f"({blocks[i : i + 2]})" for i in range(0, len(blocks), 2))


#: The norm is before the first of the parallel blocks.
_BLOCKS = {ATTENTION: ATTENTION_ENTRIES, DENSE: MLP[1:]}
_ROWS = (
    *rows.DECODER,
    *rows.SILU,
    *rows.layer_norm("layer_norm_eps"),
    Row("", "norm.bias", constant(False)),
    Row("num_hidden_layers", "", read.unread, lambda config, _: len(config.blocks) // 2),
    Row("logit_scale", "multipliers.logits", read.number(0.0625)),
    *rows.WHOLE_ROPE,
    Row("", "rope.interleaved", constant(True)),
)
COHERE = Architecture(
    model_type="cohere",
    class_name="CohereForCausalLM",
    has_classifier=False,
    blocks=_BLOCKS,
    ends=ENDS,
    rows=(
        *_ROWS,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        Row("use_qk_norm", "attention.", read.must_be(False), constant(False)),
    ),
    read_blocks=partial(_parallel, layers(uniform_layers(DENSE))),
    check=refuse_windows,
    defaults=MappingProxyType(
        {"layer_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True}
    ),
)


def _periodic_windows(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Return a window in all but every `sliding_window_pattern`-th layer."""
    period = fields.count("sliding_window_pattern")
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _rotary_windows(fields: Fields, num_layers: int) -> Sequence[AttentionKind]:
    """Return the kinds of Cohere 2: the layers with a window are those with rotary positions."""
    windows = [k.has_window for k in window_kinds(_periodic_windows)(fields, num_layers)]
    if not any(windows) or fields.raw.get("sliding_window", 0) is None:
        name = "sliding_window" if any(windows) else "layer_types"
        fields.refuse(name, "supported are windows, and so rotary positions, in some layers")
    return [AttentionKind(window, window) for window in windows]


COHERE2 = Architecture(
    model_type="cohere2",
    class_name="Cohere2ForCausalLM",
    has_classifier=False,
    blocks=_BLOCKS,
    ends=ENDS,
    rows=(
        *_ROWS,
        *rows.WHOLE_WIDTH_ATTENTION,
        *rows.BIAS,
        *attention_kinds.rows(_rotary_windows),
    ),
    read_blocks=partial(
        _parallel, layers(uniform_layers(DENSE), attention_kinds.mixers(_rotary_windows))
    ),
    aliases=frozenset({"sliding_window_pattern"}),
    defaults=MappingProxyType(
        {
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        }
    ),
)
