# SPDX-License-Identifier: Apache-2.0
"""Architecture: all that is known about a model class of `transformers`, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron.cli.two_way_table import Row
from megatron.core.models.layer_pattern import RECURRENT
from megatron.hf.entries import AnyEntry, Entry
from megatron.hf.fields import Fields

#: Entries of each kind of block, its norm included, by its symbol in layer patterns.
Blocks = Mapping[str, tuple[AnyEntry, ...]]


def _no_check(fields: Fields) -> None:
    """Accept every config.json."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model class of `transformers`.

    Args:
        model_type, class_name: `model_type` and `architectures` in config.json.
        has_classifier: whether there is a class with a classification head.
        blocks: entries of each kind of block, as published on the hub.
        fused: entries of blocks whose experts are fused into one tensor per layer in files that
            `save_pretrained` writes without converting them back.
        ends: embedding, final norm and head.
        positions: the learned positions; None for a class without.
        blocks_per_layer: 2 if a Hugging Face layer is a mixer followed by an MLP or experts.
        mtp_entries: entries of an MTP layer in addition to its blocks.
        mtp_copies: an MTP layer's copies of the embedding and of the head: (name in Hugging Face,
            entry of the weight).
        rows: fields of config.json with their fields of `GPTConfig`, both ways.
        read_blocks: returns the symbol of each block from the fields of config.json.
        check: raises ValueError for further fields that would change the function.
        is_rotary_in: returns whether the attention of a model is rotary, if its class can rotate.
        aliases: further names of fields in `rows`, and fields that do not affect the function.
        defaults: values of absent fields.
        has_ropes_of_types: whether `rope_parameters` has an object for each kind of attention.
        other_prefix: (prefix of the tables, prefix in files of another origin: written by
            `save_pretrained` without converting names back, or GPT-2's on the hub).
        skipped_prefix: prefix of tensors that the model does not use.
        reference_fields: returns the fields to change in config.json so that `transformers`
            computes the published model.
    """

    model_type: str
    class_name: str
    has_classifier: bool = True
    blocks: Blocks
    fused: Blocks = field(default_factory=dict)
    ends: tuple[Entry, Entry, Entry]
    positions: Entry | None = None
    blocks_per_layer: int = 2
    mtp_entries: tuple[AnyEntry, ...] = ()
    mtp_copies: tuple[tuple[str, Entry], ...] = ()
    rows: tuple[Row, ...]
    read_blocks: Callable[[Fields], str]
    check: Callable[[Fields], None] = _no_check
    is_rotary_in: Callable[[Fields], bool] = lambda fields: True
    aliases: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_ropes_of_types: bool = False
    other_prefix: tuple[str, str] | None = None
    skipped_prefix: str | None = None
    reference_fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: {}

    @cached_property
    def fields(self) -> frozenset[str]:
        """The fields of config.json that this class reads."""
        return self.aliases | {row.name for row in self.rows}

    @property
    def classifier_class(self) -> str | None:
        """The class with a classification head; None if `transformers` has none."""
        if not self.has_classifier:
            return None
        return self.class_name.replace("ForCausalLM", "ForSequenceClassification")

    @property
    def is_hybrid(self) -> bool:
        """Whether models of this class may have recurrent mixers."""
        return any(symbol in self.blocks for symbol in RECURRENT)

    @property
    def is_rotary(self) -> bool:
        """Whether models of this class have rotary positions."""
        return any(row.path.startswith("rope.") for row in self.rows)
