# SPDX-License-Identifier: Apache-2.0
"""Layer patterns: one symbol a block, and `|` between pipeline stages.

`*` is attention, `-` an MLP, `E` a mixture of experts. A GPT of L layers is `*-` repeated L times,
with `*E` where a layer has experts.
"""

from __future__ import annotations

import re

ATTENTION, DENSE, EXPERTS = "*", "-", "E"

#: Stands between the blocks of two virtual pipeline stages.
CUT = "|"


def symbols_of(pattern: str) -> str:
    """Return the blocks of a pattern alone, without the cuts between stages."""
    return pattern.replace(CUT, "")


def symbol_problems(pattern: str) -> list[str]:
    """List what is wrong with the symbols of a pattern; empty if nothing is."""
    symbols = symbols_of(pattern)
    if symbols and not set(symbols) - {ATTENTION, DENSE, EXPERTS}:
        return []
    return [
        f"layer pattern {pattern!r} must be one or more of '*' (attention), '-' (MLP) and 'E' "
        "(experts), with '|' where a pipeline stage ends"
    ]


def layer_blocks(symbols: str) -> list[tuple[int, int]]:
    """Return the [first, last) blocks of each layer of a pattern without cuts.

    An attention block and the MLP or experts behind it are one layer, any other block is one by
    itself.
    """
    return [(found.start(), found.end()) for found in re.finditer(r"\*[-E]|.", symbols)]
