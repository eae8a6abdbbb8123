# SPDX-License-Identifier: Apache-2.0
"""Which layers have experts: how `--moe-layer-freq` is written, and what a layer pattern adds."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from megatron.core.models.layer_pattern import DENSE, EXPERTS, ffn_of
from megatron.training.config.layer_pattern import FLAG, is_hybrid, written

if TYPE_CHECKING:
    from megatron.training.config import Config

#: Layers that a text may write out; no model has as many.
_MOST_LAYERS = 10_000


def expert_layers(config: Config) -> str:
    """Return what follows attention in each layer of a GPT: `E` experts, `-` an MLP.

    Nothing for a hybrid, whose pattern says all.

    Raises:
        ValueError: a text that says nothing of the kind, or the two of them differ.
    """
    layers, given = config.model.num_layers, config.experts.moe_layer_freq
    if is_hybrid(config):
        return ""
    if config.experts.num_experts is None:
        return DENSE * layers
    pattern = written(config)
    found = None if given is None else read_frequency(given, layers)
    if pattern is None:
        return found or EXPERTS * layers
    of_pattern = ffn_of(pattern.blocks)
    assert of_pattern is not None, "it is no hybrid"
    if found is not None and found != of_pattern:
        raise ValueError(
            f"--moe-layer-freq {given} and {FLAG} {pattern.main} differ in which layers have "
            "experts: drop the first"
        )
    return of_pattern


def read_frequency(text: str, num_layers: int) -> str:
    """Return what follows attention in each of so many layers, by the text of --moe-layer-freq.

    Args:
        text: "2", every second layer from the first on; "0,1,1", or what Python makes such a list
            of: "[0]*1+([1]*3+[0])*2".

    Raises:
        ValueError: another text, or one of another number of layers.
    """
    words = text.replace(" ", "")
    if words.isdecimal() and words.isascii() and len(words) < 6 and int(words) > 0:
        return "".join(DENSE if i % int(words) else EXPERTS for i in range(num_layers))
    if re.fullmatch("[01](,[01])+", words):
        words = f"[{words}]"
    try:
        found = _List(words).read()
    except (ValueError, IndexError, RecursionError):
        raise ValueError(
            f"--moe-layer-freq {text} is neither a number above 0 nor a list of 0 and 1: write as "
            "in 2, 0,1,1 or [0]*1+[1]*3"
        ) from None
    if len(found) != num_layers:
        raise ValueError(
            f"--moe-layer-freq {text} is of {len(found)} layers, --num-layers is {num_layers}: "
            "write a 0 or 1 for each"
        )
    return found.replace("0", DENSE).replace("1", EXPERTS)


def write_frequency(layers: str) -> str:
    """Return the text of --moe-layer-freq for what `expert_layers` returns: "[0]*1+[1]*3", or "1"
    where all layers have experts."""
    if set(layers) == {EXPERTS}:
        return "1"
    runs = ((symbol, len(list(run))) for symbol, run in itertools.groupby(layers))
    return "+".join(f"[{int(symbol == EXPERTS)}]*{count}" for symbol, count in runs)


class _List:
    """Reads the list of zeros and ones that an expression of Python's makes."""

    def __init__(self, words: str) -> None:
        self._tokens = re.findall(r"\[[01](?:,[01])*\]|[0-9]+|.", words)
        self._at = 0

    def read(self) -> str:
        """Return its zeros and ones. Raises ValueError or IndexError for any other text."""
        found = self._sum()
        if self._at < len(self._tokens):
            raise ValueError("something is left over")
        return found

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _comes(self, symbol: str) -> bool:
        """Return whether the next token is this one, and pass it if so."""
        comes = self._tokens[self._at : self._at + 1] == [symbol]
        self._at += comes
        return comes

    def _sum(self) -> str:
        found = self._product()
        while self._comes("+"):
            found += self._product()
        return found

    def _product(self) -> str:
        found = self._part()
        while self._comes("*"):
            times = int(self._next())
            if len(found) * times > _MOST_LAYERS:
                raise ValueError("more than a model has")
            found *= times
        return found

    def _part(self) -> str:
        token = self._next()
        if token == "(":
            found = self._sum()
            if not self._comes(")"):
                raise ValueError("an open parenthesis")
            return found
        if not token.startswith("["):
            raise ValueError("no list")
        return token.strip("[]").replace(",", "")
