# SPDX-License-Identifier: Apache-2.0
"""Which elements of an owned range are updated with which share of the rate and of the decay.

By default every weight takes the whole learning rate, and all but biases and norms take weight
decay. Patterns over logical weight names (shell wildcards, the first that matches wins) replace
either factor. Logical names are the same on every layout, and so are the factors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from megatron.core.weight_gather.owned import OwnedRange

#: Pairs of a pattern and the factor of the weights whose names match it first.
NameFactors: TypeAlias = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class UpdateRanges:
    """Element ranges of one owned range that are updated alike.

    Args:
        ranges: [start, stop) pairs in order.
        lr_factor: multiplies the step's learning rate.
        decay_factor: multiplies the step's weight decay.
    """

    ranges: tuple[tuple[int, int], ...]
    lr_factor: float
    decay_factor: float


def factor_problems(factors: NameFactors, *, what: str) -> list[str]:
    """List the factors that are negative or not finite, and patterns given twice."""
    found = [
        f"{what} {pattern}={factor}: use a finite factor of at least 0"
        for pattern, factor in factors
        if not 0.0 <= factor < math.inf
    ]
    patterns = [pattern for pattern, _ in factors]
    return found + [
        f"{what} {pattern} is given twice: keep one"
        for pattern in sorted({p for p in patterns if patterns.count(p) > 1})
    ]


def check_patterns(factors: NameFactors, names: Collection[str], *, what: str) -> None:
    """See that every pattern matches a weight.

    Args:
        names: logical names of the whole model's weights.
        what: how to call the setting in an error.

    Raises:
        ValueError: patterns that match none, all of them in one message.
    """
    unmatched = [p for p, _ in factors if not any(fnmatchcase(name, p) for name in names)]
    if unmatched:
        few = ", ".join(sorted(names)[:6])
        raise ValueError(
            f"{what}: no weight is called {' or '.join(unmatched)}: "
            f"weights have names such as {few}"
        )


def update_ranges(
    owned: OwnedRange, *, lr: NameFactors, weight_decay: NameFactors
) -> list[UpdateRanges]:
    """Divide an owned range into what is updated alike.

    Args:
        lr, weight_decay: factors by name; weights without a match keep the default.

    Returns:
        Ranges without overlap; with factors they cover the owned boxes, the padding of a
        vocabulary left out.
    """
    if not lr and not weight_decay:
        both = UpdateRanges(owned.decayed, 1.0, 1.0), UpdateRanges(owned.undecayed, 1.0, 0.0)
        return [one for one in both if one.ranges]
    found: dict[tuple[float, float], list[tuple[int, int]]] = {}
    for placed in owned.boxes:
        start, stop = placed.box.start, placed.box.start + placed.box.numel
        default = 1.0 if any(a <= start < b for a, b in owned.decayed) else 0.0
        key = _factor(placed.box.name, lr, 1.0), _factor(placed.box.name, weight_decay, default)
        ranges = found.setdefault(key, [])
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return [UpdateRanges(tuple(ranges), *key) for key, ranges in sorted(found.items())]


def _factor(name: str, factors: Sequence[tuple[str, float]], default: float) -> float:
    return next((f for pattern, f in factors if fnmatchcase(name, pattern)), default)
