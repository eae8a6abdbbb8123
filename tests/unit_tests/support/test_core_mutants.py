# SPDX-License-Identifier: Apache-2.0
"""Recorded mutants are located after their code has moved, and redrawn when it is gone."""

import importlib
import sys
import textwrap
from dataclasses import replace

import pytest

from tools.core_mutants.contexts import Contexts
from tools.core_mutants.judge import rechecks
from tools.core_mutants.record import (
    KILLED,
    SURVIVED,
    Record,
    compare,
    draw,
    locate,
    sites,
)

BOX = """
    class Box:
        def volume(self, a, b):
            if a > 0:
                return a * a
            return (
                a
                - b
            )

        def half(self, a):
            return a // 2
"""
HALF = """
    def half(a):
        return a + 2
"""


@pytest.fixture
def write_modules(tmp_path, monkeypatch):
    """Write modules into a folder on the import path, and return their mutable sites."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tools.core_mutants.record.core_folder", tmp_path.resolve)

    def write(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return sites(modules)

    return write


def _mutant_with_text(module_sites, text):
    [site] = [site for site in module_sites if site.mutation.text == text]
    record = draw([site], 1, seed=1)
    return record.mutants[0]


def test_edit_is_located_where_its_method_moved(write_modules):
    mutant = _mutant_with_text(write_modules(box=BOX, other=HALF), "(a + b)")
    moved = write_modules(box="", other=HALF + BOX)
    assert locate(mutant, moved).mutation.module == "other"
    deeper = "    class Outer:" + textwrap.indent(BOX, "    ")
    assert locate(mutant, write_modules(box=deeper)).mutation.function == "Outer.Box.volume"
    assert locate(mutant, write_modules(box=BOX, other="")).mutation.module == "box"


def test_edit_on_changed_line_is_located_if_unique(write_modules):
    mutant = _mutant_with_text(write_modules(box=BOX), "(a * 2)")
    once = BOX.replace("return a // 2", "return 1 + a // 2")
    twice = BOX.replace("return a // 2", "return (1 + a // 2, a // 2)")
    assert locate(mutant, write_modules(box=once)).line == "return 1 + a // 2"
    assert locate(mutant, write_modules(box=twice)) is None


def test_drop_in_killed_mutants_is_reported_by_name(write_modules):
    drawn = draw(write_modules(box=BOX), 3, seed=3)
    mutant_1, mutant_2, mutant_3 = drawn.mutants
    old = (replace(mutant_1, verdict=KILLED), replace(mutant_2, verdict=SURVIVED), mutant_3)
    moved = (replace(mutant_1, verdict=SURVIVED), replace(mutant_2, verdict=KILLED), mutant_3)
    lines, fewer = compare(Record(3, old), Record(3, moved))
    assert not fewer
    assert sum(line.startswith("killed before, survived now: 1.") for line in lines) == 1
    survived = (replace(mutant_1, verdict=SURVIVED), mutant_2, mutant_3)
    assert compare(Record(3, old), Record(3, survived))[1]


def test_recheck_runs_former_killer_at_its_new_path(write_modules):
    box_sites = write_modules(one=BOX)
    drawn = draw(box_sites, 3, seed=1).mutants
    killed = replace(drawn[0], verdict=KILLED, by="tests/old/test_core_mutants.py::test_killer")
    gone = replace(drawn[1], verdict=KILLED, by="tests/x.py::test_killer", number=2)
    survived = replace(drawn[2], verdict=SURVIVED)
    contexts = Contexts()
    sites_by_number = {killed.number: box_sites[0]}
    chosen = rechecks([killed, gone, survived], lambda m: sites_by_number.get(m.number), contexts)
    test = "tests/unit_tests/support/test_core_mutants.py::test_killer"
    assert [(case.mutant, case.tests) for case in chosen] == [(killed, [test])]
    assert test in contexts.seconds
    lost = replace(killed, by="tests/no_such_file.py::test_killer")
    with pytest.raises(ValueError, match="no_such_file"):
        rechecks([lost], lambda m: sites_by_number.get(m.number), contexts)
