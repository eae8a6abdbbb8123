# SPDX-License-Identifier: Apache-2.0
"""Covering arrays: few test rows in which every allowed pair (or triple) of settings occurs.

Most faults need one or two settings to meet (Kuhn, Wallace, Gallo 2004, "Software fault
interactions"). An array of strength 2 has every pair of values of every two factors in some row;
its length grows with the logarithm of the number of factors, where the product grows exponentially.
Rows are built greedily, one at a time, by the scheme of Cohen et al. 1997 (AETG), and constraints
say which settings may not meet.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Tuple = frozenset[tuple[str, Hashable]]


@dataclass(frozen=True)
class Constraint:
    """Say which values of a few factors may stand in one row.

    Args:
        factors: the names that `allowed` is called with, in this order, once all of them have
        values. allowed: a pure predicate.
    """

    factors: tuple[str, ...]
    allowed: Callable[..., bool]


class _Space:
    """Factors and constraints, and the question whether a partial row can be completed."""

    def __init__(
        self, factors: Mapping[str, Sequence[Hashable]], constraints: Sequence[Constraint]
    ) -> None:
        for name, values in factors.items():
            if not values or len(set(values)) != len(values):
                raise ValueError(f"factor {name} has no values or repeats one: {list(values)}")
        for constraint in constraints:
            if unknown := set(constraint.factors) - set(factors):
                raise ValueError(f"a constraint names unknown factors: {sorted(unknown)}")
        self.factors = {name: list(values) for name, values in factors.items()}
        self.constraints = list(constraints)
        constrained = {name for constraint in constraints for name in constraint.factors}
        self.constrained = [name for name in factors if name in constrained]
        self._of = {
            name: [c for c in self.constraints if name in c.factors] for name in self.constrained
        }
        self._near = {
            name: sorted({other for c in self._of[name] for other in c.factors})
            for name in self._of
        }
        self._known: dict[tuple[Hashable, ...], bool] = {}
        self._parts: dict[tuple[str, ...], list[tuple[tuple[str, ...], tuple[str, ...]]]] = {}

    def consistent(self, row: Row) -> bool:
        """Tell whether no constraint whose factors all have values is broken."""
        return all(_holds(constraint, row) for constraint in self.constraints)

    def feasible(self, row: Row) -> bool:
        """Tell whether some complete row contains `row`. Factors without constraints are free."""
        missing = tuple(name for name in self.constrained if name not in row)
        touched = dict.fromkeys(c for name in row for c in self._of.get(name, ()))
        return all(_holds(c, row) for c in touched) and self._completable(row, missing)

    def still_feasible(self, row: Row, added: str) -> bool:
        """Tell the same of a row that was feasible before it got a value for `added`."""
        if added not in self._of:
            return True
        missing = tuple(name for name in self.constrained if name not in row)
        if not all(_holds(c, row) for c in self._of[added]):
            return False
        return all(
            self._has_values(row, part, near)
            for part, near in self._divided(missing)
            if added in near  # what no constraint joins with it has values as before
        )

    def _completable(self, row: Row, missing: tuple[str, ...]) -> bool:
        """Tell whether values for `missing` exist; what no constraint joins is tried apart."""
        return all(self._has_values(row, part, near) for part, near in self._divided(missing))

    def _has_values(self, row: Row, part: tuple[str, ...], near: tuple[str, ...]) -> bool:
        """Tell whether values for a part exist, given those of the factors near it."""
        key = part, tuple(row.get(name, self) for name in near)
        if key not in self._known:
            name, rest = part[0], part[1:]
            self._known[key] = any(
                all(_holds(c, longer) for c in self._of[name]) and self._completable(longer, rest)
                for longer in ({**row, name: value} for value in self.factors[name])
            )
        return self._known[key]

    def _divided(self, missing: tuple[str, ...]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Divide factors into sets that share no constraint, each with the other factors that
        share one with it."""
        if missing not in self._parts:
            found, left = [], dict.fromkeys(missing)
            while left:
                part, near, edge = {}, set(), [next(iter(left))]
                while edge:
                    name = edge.pop()
                    if name in left:
                        del left[name]
                        part[name] = None
                        edge += self._near[name]
                    elif name not in part:
                        near.add(name)
                found.append((tuple(part), tuple(sorted(near))))
            self._parts[missing] = found
        return self._parts[missing]


def _holds(constraint: Constraint, row: Row) -> bool:
    """Tell whether a constraint is not broken; it is not before all its factors have values."""
    if any(name not in row for name in constraint.factors):
        return True
    return constraint.allowed(*(row[name] for name in constraint.factors))


def tuples_of(row: Mapping[str, Hashable], strength: int) -> set[Tuple]:
    """Return the combinations of `strength` settings that a row holds."""
    return {frozenset(chosen) for chosen in itertools.combinations(row.items(), strength)}


def allowed_tuples(
    factors: Mapping[str, Sequence[Hashable]],
    constraints: Sequence[Constraint] = (),
    *,
    strength: int = 2,
) -> list[Tuple]:
    """List every combination of `strength` settings that some allowed row holds."""
    space = _Space(factors, constraints)
    return [
        frozenset(zip(names, values, strict=True))
        for names in itertools.combinations(factors, strength)
        for values in itertools.product(*(space.factors[name] for name in names))
        if space.feasible(dict(zip(names, values, strict=True)))
    ]


def covering_array(
    factors: Mapping[str, Sequence[Hashable]],
    constraints: Sequence[Constraint] = (),
    *,
    strength: int = 2,
    seed: int = 0,
    start: Iterable[Mapping[str, Hashable]] = (),
    candidates: int = 20,
) -> list[Row]:
    """Return rows that together hold every allowed combination of `strength` settings.

    Args:
        factors: values by factor name.
        constraints: which values may not meet.
        strength: 2 for pairs, 3 for triples.
        seed: the array is a pure function of it and of the other arguments.
        start: complete rows that are wanted in any case; they come first.
        candidates: how many rows are drafted for each one that is kept.

    Raises:
        ValueError: an empty factor, an unknown name, a bad `start` row, or no allowed row at all.
    """
    space = _Space(factors, constraints)
    if not space.feasible({}):
        raise ValueError("the constraints allow no row")
    uncovered = dict.fromkeys(allowed_tuples(factors, constraints, strength=strength))
    rows: list[Row] = []
    for given in start:
        if set(given) != set(factors) or not space.consistent(dict(given)):
            raise ValueError(f"a start row is incomplete or not allowed: {dict(given)}")
        rows.append({name: given[name] for name in factors})
        _cover(uncovered, rows[-1], strength)
    draw = random.Random(seed)
    while uncovered:
        drafts = [_draft(space, uncovered, strength, draw) for _ in range(candidates)]
        best = max(drafts, key=lambda row: _gain(uncovered, row, strength))
        rows.append({name: best[name] for name in factors})
        _cover(uncovered, best, strength)
    return rows


def _gain(uncovered: Mapping[Tuple, None], row: Row, strength: int) -> int:
    return sum(found in uncovered for found in tuples_of(row, strength))


def _cover(uncovered: dict[Tuple, None], row: Row, strength: int) -> None:
    for found in tuples_of(row, strength):
        uncovered.pop(found, None)


def _draft(
    space: _Space, uncovered: Mapping[Tuple, None], strength: int, draw: random.Random
) -> Row:
    """Complete a random uncovered combination, factor by factor, to a row that covers many more."""
    row: Row = dict(sorted(draw.choice(list(uncovered))))
    rest = [name for name in space.factors if name not in row]
    draw.shuffle(rest)
    for name in rest:
        values = list(space.factors[name])
        draw.shuffle(values)
        options = [{**row, name: value} for value in values]
        options.sort(key=lambda option: -_new_with(uncovered, option, name, strength))
        row = next(option for option in options if space.still_feasible(option, name))
    return row


def _new_with(uncovered: Mapping[Tuple, None], row: Row, name: str, strength: int) -> int:
    """Count the uncovered combinations that setting `name` completes."""
    others = [item for item in row.items() if item[0] != name]
    setting = (name, row[name])
    return sum(
        frozenset((setting, *chosen)) in uncovered
        for chosen in itertools.combinations(others, strength - 1)
    )
