# SPDX-License-Identifier: Apache-2.0
"""Options of blocks that a layer pattern does not have: given all the same, they are an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.models.layer_pattern import ATTENTIONS, DENSE, FEED_FORWARD
from megatron.training.config.layer_pattern import FLAG, has, is_hybrid, written

if TYPE_CHECKING:
    from megatron.training.config import Config

#: Fields by section; no names are all of a section but how positions enter, of which
#: `layer_pattern.problems` speaks.
_OF_ATTENTION: dict[str, tuple[str, ...]] = {
    "model": (
        "num_attention_heads",
        "group_query_attention",
        "num_query_groups",
        "kv_channels",
        "add_qkv_bias",
        "add_attention_output_bias",
    ),
    "attention": (),
    "position": (),
    "parallel": ("cp_comm_type", "context_parallel_cut", "attention_backend"),
}

#: (symbols of which a pattern has one, what they are called, fields by section).
_BLOCKS: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
    (ATTENTIONS, "attention", _OF_ATTENTION),
    (FEED_FORWARD, "MLP", {"model": ("swiglu", "squared_relu", "add_mlp_bias")}),
)


def problems(config: Config) -> Iterator[str]:
    """Name every option that is not as without it and has no block to act on, with its mend."""
    pattern = written(config)
    if pattern is None or not is_hybrid(config):
        return
    for symbols, noun, fields in _BLOCKS:
        if not any(has(config, symbol) for symbol in symbols):
            for flag in _given(config, fields):
                yield f"{flag} has no effect: {FLAG} {pattern.main} has no {noun}: drop it"
    width, experts = config.model.ffn_hidden_size, config.experts
    derived = dataclasses.replace(config.model, ffn_hidden_size=None).inner_features
    # Those that a resolved run has are not the user's.
    if not has(config, DENSE) and width not in (None, derived, experts.moe_ffn_hidden_size):
        if experts.num_experts is None:
            reason = f"{FLAG} {pattern.main} has no MLP"
        elif experts.moe_ffn_hidden_size is not None:
            reason = f"{FLAG} {pattern.main} has no MLP, and experts their --moe-ffn-hidden-size"
        else:
            return
        yield f"--ffn-hidden-size {width} has no effect: {reason}: drop it"


def _given(config: Config, fields: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Return, as they are written, options of these fields that ask for something."""
    for section, names in fields.items():
        holder: Any = vars(config)[section]
        for field in dataclasses.fields(holder):
            value = vars(holder)[field.name]
            if (names and field.name not in names) or value == field.default:
                continue
            if field.name == "position_embedding_type" or (
                field.name == "attention_dropout" and value == 0.0
            ):
                continue
            flag = f"--{field.name.replace('_', '-')}"
            yield flag if value is True else f"{flag} {value}"
