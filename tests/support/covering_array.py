# SPDX-License-Identifier: Apache-2.0
"""Covering arrays: few test rows in which every allowed pair (or triple) of settings occurs.

Most faults need one or two settings to meet (Kuhn, Wallace, Gallo 2004, "Software fault
interactions"). An array of strength 2 has every pair of values of every two factors in some row;
its length grows with the logarithm of the number of factors, where the product grows exponentially.
Rows are built greedily, one at a time, by the scheme of Cohen et al. 1997 (AETG), and constraints
say which settings may not meet.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]
Tuple = frozenset[tuple[str, Hashable]]


@dataclass(frozen=True)
class Constraint:
    """The allowed combinations of values of a few factors in one row.

    Args:
        factors: names of the factors whose values `allowed` takes, in this order. It is called once
            every factor has a value.
        allowed: a pure predicate.
    """

    factors: tuple[str, ...]
    allowed: Callable[..., bool]


class _Space:
    """The settings of all factors, and the combinations that an allowed row can hold.

    A factor is a leaf if no constraint joins it with another leaf. The other factors are the core;
    once the core has values, each leaf is free to choose its value alone. A set of settings is
    therefore allowed if one assignment of the core allows every setting. A bit mask holds one bit
    for each assignment of the core.

    Attributes:
        settings: (factor, value) in the order of factors and of their values.
        of: the setting numbers of each factor.
        fits: by setting, the mask of core assignments that allow it.
    """

    def __init__(
        self, factors: Mapping[str, Sequence[Hashable]], constraints: Sequence[Constraint]
    ) -> None:
        for name, values in factors.items():
            if not values or len(set(values)) != len(values):
                raise ValueError(f"factor {name} has no values or repeats one: {list(values)}")
        for constraint in constraints:
            if unknown := set(constraint.factors) - set(factors):
                raise ValueError(f"a constraint names unknown factors: {sorted(unknown)}")
        self.constraints = constraints
        self.settings = [(name, value) for name, values in factors.items() for value in values]
        self.of: dict[str, list[int]] = {name: [] for name in factors}
        for number, (name, _) in enumerate(self.settings):
            self.of[name].append(number)
        self._assignments = _assignments(factors, constraints, _core(constraints))
        self._masks: dict[tuple[str, ...], dict[tuple[Hashable, ...], int]] = {}
        self.everywhere = (1 << len(self._assignments)) - 1
        self.fits = [self._fits(name, value) for name, value in self.settings]
        for numbers in self.of.values():  # each factor must have a value
            self.everywhere &= functools.reduce(operator.or_, (self.fits[n] for n in numbers))

    def _fits(self, name: str, value: Hashable) -> int:
        """Return the assignments that allow a setting."""
        if self._assignments and name in self._assignments[0]:
            return self._with((name,)).get((value,), 0)
        fits = self.everywhere
        for constraint in self.constraints:
            if name in constraint.factors:
                other_factors = tuple(factor for factor in constraint.factors if factor != name)
                fits &= sum(
                    mask
                    for values, mask in self._with(other_factors).items()
                    if _holds(
                        constraint, {name: value, **dict(zip(other_factors, values, strict=True))}
                    )
                )
        return fits

    def _with(self, names: tuple[str, ...]) -> dict[tuple[Hashable, ...], int]:
        """Return the mask of assignments for each combination of values of some core factors."""
        if names not in self._masks:
            masks: dict[tuple[Hashable, ...], int] = defaultdict(int)
            for number, row in enumerate(self._assignments):
                masks[tuple(row[name] for name in names)] |= 1 << number
            self._masks[names] = masks
        return self._masks[names]

    def number(self, row: Mapping[str, Hashable]) -> list[int]:
        """Return the numbers of a complete row's settings."""
        return [self.settings.index((name, row[name])) for name in self.of]

    def row(self, numbers: Iterable[int]) -> Row:
        """Return the row with the given setting numbers."""
        return dict(self.settings[n] for n in sorted(numbers))

    def tuples(self, strength: int) -> list[tuple[int, ...]]:
        """Return every allowed combination of settings of different factors."""
        chosen: list[tuple[int, ...]] = []
        for names in itertools.combinations(self.of, strength):
            partial: list[tuple[tuple[int, ...], int]] = [((), self.everywhere)]
            for name in names:
                partial = [
                    ((*numbers, number), assignments)
                    for numbers, fits in partial
                    for number in self.of[name]
                    if (assignments := fits & self.fits[number])
                ]
            chosen += [numbers for numbers, _ in partial]
        return chosen


def _core(constraints: Sequence[Constraint]) -> list[str]:
    """Choose factors greedily until no constraint joins two of the remaining factors."""
    core: list[str] = []
    while True:
        joined = [set(c.factors).difference(core) for c in constraints]
        counts = Counter(name for names in joined if len(names) > 1 for name in sorted(names))
        if not counts:
            return core
        core.append(max(counts, key=counts.__getitem__))


def _assignments(
    factors: Mapping[str, Sequence[Hashable]], constraints: Sequence[Constraint], core: list[str]
) -> list[Row]:
    """Return all values of the core that break no constraint."""
    rows: list[Row] = [{}]
    for name in core:
        applicable = [c for c in constraints if name in c.factors]
        longer = [{**row, name: value} for row in rows for value in factors[name]]
        rows = [row for row in longer if all(_holds(c, row) for c in applicable)]
    return rows


def _holds(constraint: Constraint, row: Mapping[str, Hashable]) -> bool:
    """Return whether a row satisfies a constraint, or lacks a value for one of its factors."""
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
    return [frozenset(space.settings[n] for n in chosen) for chosen in space.tuples(strength)]


def covering_array(
    factors: Mapping[str, Sequence[Hashable]],
    constraints: Sequence[Constraint] = (),
    *,
    strength: int = 2,
    seed: int = 0,
    start: Iterable[Mapping[str, Hashable]] = (),
    candidates: int = 20,
    cost: Callable[[Row], float] = lambda row: 1.0,
) -> list[Row]:
    """Return rows that together hold every allowed combination of `strength` settings.

    Args:
        factors: values by factor name.
        constraints: which values may not meet.
        strength: 2 for pairs, 3 for triples.
        seed: the array is a pure function of it and of the other arguments.
        start: complete rows that the array must contain; they come first.
        candidates: number of rows drafted for each row of the array.
        cost: the cost of a row; the draft with the most newly covered combinations per cost wins.

    Raises:
        ValueError: an empty factor, an unknown name, a bad `start` row, or no allowed row at all.
    """
    space = _Space(factors, constraints)
    if not space.everywhere:
        raise ValueError("the constraints allow no row")
    uncovered = _Uncovered(space, strength)
    rows: list[list[int]] = []
    for start_row in start:
        if set(start_row) != set(factors) or not all(_holds(c, start_row) for c in constraints):
            raise ValueError(f"a start row is incomplete or not allowed: {dict(start_row)}")
        rows.append(space.number(start_row))
        uncovered.cover(rows[-1])
    draw = random.Random(seed)
    while left := uncovered.left():
        drafts = [_draft(space, uncovered, draw.choice(left), draw) for _ in range(candidates)]
        rows.append(max(drafts, key=lambda d: d.gain / cost(space.row(d.numbers))).numbers)
        uncovered.cover(rows[-1])
    return [space.row(numbers) for numbers in rows]


class _Uncovered:
    """The combinations that no row holds yet.

    Attributes:
        table: fp32, settings in as many dimensions as a combination has, in any order; 1 where no
            row holds them.
    """

    def __init__(self, space: _Space, strength: int) -> None:
        self.strength = strength
        self._ordered = np.array(space.tuples(strength))  # [combinations, strength]
        self.table = np.zeros((len(space.settings),) * strength, dtype=np.float32)
        for order in itertools.permutations(range(strength)):
            self.table[tuple(self._ordered[:, order].T)] = 1.0

    def left(self) -> list[list[int]]:
        """Return the combinations that are left."""
        self._ordered = self._ordered[self.table[tuple(self._ordered.T)] > 0]
        return self._ordered.tolist()

    def cover(self, numbers: Sequence[int]) -> None:
        """Remove the combinations of a row."""
        self.table[np.ix_(*[numbers] * self.strength)] = 0.0

    def completed_by(self, number: int, present: np.ndarray) -> np.ndarray | float:
        """Return for each setting [settings] the number of uncovered combinations that it completes
        together with `number` and settings of `present`.

        Args:
            present: fp32 [settings], 1 for each setting of the row.
        """
        if self.strength == 1:
            return 0.0
        counted = self.table[number]
        for _ in range(self.strength - 2):
            counted = counted @ present
        return counted / math.factorial(self.strength - 2)


class _Draft:
    """A row that grows by one setting at a time.

    Attributes:
        numbers: its settings.
        fits: the mask of core assignments that allow all settings of the row.
        gains: by setting, the uncovered combinations that it would complete.
        gain: the uncovered combinations that the row holds.
    """

    def __init__(self, space: _Space, uncovered: _Uncovered) -> None:
        self._space, self._uncovered = space, uncovered
        self.numbers: list[int] = []
        self.fits = space.everywhere
        self.gain = 0.0
        self._has = np.zeros(len(space.settings), dtype=np.float32)
        alone = uncovered.table if uncovered.strength == 1 else self._has
        self.gains = alone.copy()

    def add(self, number: int) -> None:
        """Give the row one more setting."""
        self.gain += self.gains[number]
        self.fits &= self._space.fits[number]
        self.gains += self._uncovered.completed_by(number, self._has)
        self._has[number] = 1.0
        self.numbers.append(number)


def _draft(
    space: _Space, uncovered: _Uncovered, combination: Sequence[int], draw: random.Random
) -> _Draft:
    """Complete an uncovered combination, factor by factor, to a row that covers many more."""
    draft = _Draft(space, uncovered)
    for number in combination:
        draft.add(number)
    free_factors = [
        name for name, numbers in space.of.items() if not set(numbers) & set(combination)
    ]
    draw.shuffle(free_factors)
    for name in free_factors:
        options = list(space.of[name])
        draw.shuffle(options)
        options = [number for number in options if draft.fits & space.fits[number]]
        draft.add(max(options, key=draft.gains.__getitem__))
    return draft
