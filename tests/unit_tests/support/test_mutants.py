# SPDX-License-Identifier: Apache-2.0
"""Mutations edit one position, reach every reference to a function, and are sampled stably."""

import importlib
import sys
import textwrap

import pytest

from tests.support.mutants import apply, planted
from tests.support.mutation_operators import mutations
from tests.support.source_text import source_of

VICTIM = '''
"""A module to be mutated."""

import functools


def mean(values):
    """Return the mean of 1 or more values."""
    if not values:
        raise ValueError(f"{len(values)} values")
    total = 0
    for value in values:
        total += value
    return total / len(values)


def all_reduce(x, group):
    return x * group


class Box:
    """Ä, a letter of two bytes, shifts columns."""

    @staticmethod
    def own(x, group):
        log.append("ä" + str(x)); x = x + all_reduce(x, group) if group > 1 else x
        return x

    @property
    def sign(self) -> int:
        return +1 if self else 0


@functools.lru_cache
def cached(n: int = 7) -> int:
    def inner(m):
        return m - 1

    return inner(n)


log = []
'''


@pytest.fixture
def victim(tmp_path, monkeypatch):
    (tmp_path / "victim_module.py").write_text(textwrap.dedent(VICTIM), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("victim_module")
    yield module
    del sys.modules["victim_module"]


def test_planted_fault_reaches_earlier_references(victim):
    mean, box_method = victim.mean, victim.Box.own
    assert (mean([2, 4]), box_method(3, 2)) == (3, 9)
    apply(planted("victim_module", "mean", "total += value", "total = value"))
    apply(planted("victim_module", "Box.own", "x + all_reduce(x, group)", "x"))
    assert (mean([2, 4]), box_method(3, 2)) == (2, 3)
    assert victim.log == ["ä3", "ä3"]


def test_planted_fault_whose_text_is_gone_is_an_error(victim):
    with pytest.raises(ValueError, match="'value' 9"):
        planted("victim_module", "mean", "value", "x")
    with pytest.raises(ValueError, match="0 times"):
        planted("victim_module", "mean", "absent", "x")
    with pytest.raises(ValueError, match="no function nowhere"):
        planted("victim_module", "nowhere", "a", "b")


def test_every_mutation_compiles_and_changes_the_source(victim):
    text, path = source_of("victim_module")
    mutants = mutations("victim_module")
    for mutation in mutants:
        edited = text[: mutation.start] + mutation.text + text[mutation.stop :]
        compile(edited, path, "exec")
        assert edited != text
    described = "\n".join(map(str, mutants))
    for expected in (
        "mean: total += value: to Sub",
        "mean: total / len(values): to Mult",
        "mean: 0 to 1",
        "Box.own: all_reduce(x, group): skipped",
        "Box.own: group > 1: to GtE",
        "condition negated",
        "Box.own: log.append('ä' + str(x)): call dropped",
        "cached: m - 1: to Add",
    ):
        assert expected in described
    assert "raise" not in described
    assert "7 to 8" not in described  # a default
    assert "not values" not in described  # guards a raise
    assert len({m.key for m in mutants}) == len(mutants)
