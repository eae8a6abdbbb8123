# SPDX-License-Identifier: Apache-2.0
"""Arrays cover every allowed combination, contain no forbidden one, and are short."""

import itertools
import random

import pytest

from tests.support.covering_array import (
    Constraint,
    allowed_tuples,
    covering_array,
    tuples_of,
)

FACTORS = {"tp": (1, 2, 4), "dp": (1, 2), "sp": (False, True), "kv": (1, 2, 4), "norm": ("a", "b")}
CONSTRAINTS = (
    Constraint(("tp", "dp"), lambda tp, dp: 2 <= tp * dp <= 4),
    Constraint(("tp", "sp"), lambda tp, sp: tp > 1 or not sp),
)


def _allowed_rows(factors, constraints):
    """Enumerate the full product, slowly and obviously."""
    for values in itertools.product(*factors.values()):
        row = dict(zip(factors, values, strict=True))
        if all(c.allowed(*(row[n] for n in c.factors)) for c in constraints):
            yield row


@pytest.mark.parametrize("strength", [2, 3])
def test_exactly_the_allowed_combinations_are_covered(strength):
    rows = covering_array(FACTORS, CONSTRAINTS, strength=strength)
    allowed = set().union(*(tuples_of(r, strength) for r in _allowed_rows(FACTORS, CONSTRAINTS)))
    covered = set().union(*(tuples_of(row, strength) for row in rows))
    assert covered == allowed == set(allowed_tuples(FACTORS, CONSTRAINTS, strength=strength))


@pytest.mark.parametrize("seed", range(6))
def test_random_constraints_match_the_full_product(seed):
    draw = random.Random(seed)
    factors = {f"f{i}": tuple(range(draw.choice((2, 2, 3)))) for i in range(7)}
    constraints = []
    for _ in range(5):
        names = tuple(draw.sample(list(factors), draw.choice((1, 2, 2, 3))))
        product = list(itertools.product(*(factors[name] for name in names)))
        allowed = set(draw.sample(product, -(-2 * len(product) // 3)))
        constraints.append(Constraint(names, lambda *values, a=frozenset(allowed): values in a))
    rows = list(_allowed_rows(factors, constraints))
    assert rows
    allowed_triples = set().union(*(tuples_of(row, 3) for row in rows))
    assert set(allowed_tuples(factors, constraints, strength=3)) == allowed_triples
    covering_rows = covering_array(factors, constraints, strength=3, candidates=2)
    assert all(row in rows for row in covering_rows)
    assert set().union(*(tuples_of(row, 3) for row in covering_rows)) == allowed_triples


def test_required_rows_come_first_and_are_counted():
    required = {"tp": 2, "dp": 2, "sp": True, "kv": 1, "norm": "b"}
    rows = covering_array(FACTORS, CONSTRAINTS, start=[required])
    assert rows[0] == required
    assert covering_array({"a": (1, 2)}, strength=1, start=[{"a": 2}]) == [{"a": 2}, {"a": 1}]


def test_invalid_factors_and_constraints_are_refused():
    with pytest.raises(ValueError, match="repeats one"):
        covering_array({"a": (1, 1)})
    with pytest.raises(ValueError, match="unknown factors: \\['z'\\]"):
        covering_array({"a": (1,)}, [Constraint(("z",), bool)])
    with pytest.raises(ValueError, match="allow no row"):
        covering_array({"a": (0,), "b": (1,)}, [Constraint(("a",), bool)])
    with pytest.raises(ValueError, match="not allowed"):
        covering_array(FACTORS, CONSTRAINTS, start=[{"tp": 1}])
