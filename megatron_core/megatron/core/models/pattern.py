# SPDX-License-Identifier: Apache-2.0
"""Layer patterns: one symbol a block, `|` between pipeline stages, `/` before further prediction.

    symbol  block
    *       attention
    +       latent attention
    G       gated delta net
    M       Mamba-2
    -       MLP
    E       mixture of experts

A GPT of L layers is `*-` repeated L times, with `*E` where a layer has experts; Qwen3-Next is
`GEGEGE*E` repeated. Behind each `/` stand the blocks of one depth of multi-token prediction, the
same in all: `*-*-/*-/*-` has two depths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ATTENTION, LATENT, DELTA_NET, MAMBA = "*", "+", "G", "M"
DENSE, EXPERTS = "-", "E"

#: What mixes tokens, what keeps a state of them instead of keys and values, and what mixes none.
ATTENTIONS, RECURRENT, FEED_FORWARD = ATTENTION + LATENT, DELTA_NET + MAMBA, DENSE + EXPERTS

#: Stands between the blocks of two virtual pipeline stages.
CUT = "|"

#: Stands before the blocks of each depth of multi-token prediction.
FURTHER = "/"

_KNOWN = (
    "'*' (attention), '+' (latent attention), 'G' (gated delta net), 'M' (Mamba-2), '-' (MLP) and "
    "'E' (experts)"
)


@dataclass(frozen=True)
class Pattern:
    """A written pattern, taken apart; `pattern_problems` must have found nothing.

    Args:
        main: the blocks of the model, with cuts.
        further: the blocks of each depth of multi-token prediction; empty if there are none.
        depths: how many there are.
    """

    main: str
    further: str = ""
    depths: int = 0

    @staticmethod
    def of(text: str) -> Pattern:
        """Take a written pattern apart; a `/` with nothing behind it means nothing."""
        main, *parts = text.split(FURTHER)
        parts = [part for part in parts if part]
        return Pattern(main, parts[0] if parts else "", len(parts))

    @property
    def blocks(self) -> str:
        """The blocks of the model alone."""
        return symbols_of(self.main)


def symbols_of(pattern: str) -> str:
    """Return the blocks of a pattern alone, without the cuts between stages."""
    return pattern.replace(CUT, "")


def ffn_of(symbols: str) -> str | None:
    """Return what follows attention in each layer of a GPT; None if the blocks are not of one.

    A GPT's blocks come in pairs, attention (all of them latent or none) and an MLP or experts.
    """
    for attention in ATTENTIONS:
        if re.fullmatch(f"([{attention}][{FEED_FORWARD}])+", symbols):
            return symbols[1::2]
    return None


def symbol_problems(pattern: str) -> list[str]:
    """List what is wrong with the symbols of blocks and cuts; empty if nothing is."""
    symbols, what = symbols_of(pattern), f"layer pattern {pattern!r}"
    if not symbols:
        return [f"{what} must be one or more of {_KNOWN}, with '|' where a pipeline stage ends"]
    found = []
    known = ATTENTIONS + RECURRENT + FEED_FORWARD + CUT
    for place, symbol in enumerate(pattern, start=1):
        if symbol not in known:
            reason = "is unknown"
            if symbol == "D":
                reason = "would be sparse attention, which is not built here"
            found.append(f"{what}: {symbol!r} at {place} {reason}: use {_KNOWN}")
    if ATTENTION in symbols and LATENT in symbols:
        found.append(f"{what} has both '*' and '+': all attention is latent or none: keep one")
    return found


def written_problems(text: str) -> list[str]:
    """List what is wrong with a written pattern and its further parts; empty if nothing is."""
    main, *parts = text.split(FURTHER)
    parts = [part for part in parts if part]
    found = symbol_problems(main)
    for part in dict.fromkeys(parts):
        if CUT in part:
            found.append(
                f"layer pattern {text!r}: '|' behind a '/' in {part!r}: multi-token prediction is "
                "in the last pipeline stage: cut before the '/' alone"
            )
        found += symbol_problems(part.replace(CUT, ""))
    if len(set(parts)) > 1:
        found.append(
            f"layer pattern {text!r}: the parts behind '/' differ ({', '.join(parts)}): all depths "
            "of multi-token prediction have the same blocks: write them alike"
        )
    kinds = set(main + "".join(parts))
    if not found and {ATTENTION, LATENT} <= kinds:
        found.append(f"layer pattern {text!r} has both '*' and '+': keep one")
    return found


def layer_blocks(symbols: str) -> list[tuple[int, int]]:
    """Return the [first, last) blocks of each layer of a pattern without cuts.

    A block that mixes tokens and the MLP or experts behind it are one layer, any other block is one
    by itself.
    """
    layer = f"[{re.escape(ATTENTIONS)}{RECURRENT}][{FEED_FORWARD}]|."
    return [(found.start(), found.end()) for found in re.finditer(layer, symbols)]
