# SPDX-License-Identifier: Apache-2.0
"""Recorded mutants are located after their code has moved, and redrawn when it is gone."""

import importlib
import json
import sys
import textwrap
from dataclasses import replace

import pytest

from tools.core_mutants.contexts import Contexts
from tools.core_mutants.judge import affordable, rechecks
from tools.core_mutants.record import (
    KILLED,
    SURVIVED,
    Record,
    compare,
    draw,
    lines_of,
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


def test_edit_is_located_in_renamed_class_of_same_method(write_modules):
    mutant = _mutant_with_text(write_modules(box=BOX), "(a * 2)")
    moved = write_modules(box="", other=HALF + BOX.replace("Box", "Crate").replace("half", "_half"))
    site = locate(mutant, moved)
    assert (site.mutation.module, site.mutation.function) == ("other", "Crate._half")


def test_different_edit_does_not_match(write_modules):
    mutant = _mutant_with_text(write_modules(box=BOX), "(a * 2)")
    assert locate(mutant, write_modules(box="", other=HALF)) is None


def test_edit_on_changed_line_is_located_if_unique(write_modules):
    mutant = _mutant_with_text(write_modules(box=BOX), "(a * 2)")
    once = BOX.replace("return a // 2", "return 1 + a // 2")
    twice = BOX.replace("return a // 2", "return (1 + a // 2, a // 2)")
    assert locate(mutant, write_modules(box=once)).line == "return 1 + a // 2"
    assert locate(mutant, write_modules(box=twice)) is None


def test_second_of_two_equal_edits_on_a_line_is_distinguished(write_modules):
    twice = BOX.replace("return a // 2", "return (a // 2, a // 2)")
    equal_sites = [site for site in write_modules(box=twice) if site.mutation.text == "(a * 2)"]
    second = replace(draw(equal_sites[1:], 1, seed=1).mutants[0])
    assert second.occurrence == 2
    assert locate(second, equal_sites) == equal_sites[1]


def test_draw_is_repeatable_and_replaces_gone_mutants(write_modules, tmp_path):
    box_sites = write_modules(box=BOX)
    record = draw(box_sites, 4, seed=3)
    assert record == draw(list(reversed(box_sites)), 4, seed=3)
    record.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == record
    text = BOX.replace("a - b", "a").replace("- b", "").replace("a * a", "b")
    changed = write_modules(box=text, other=HALF)
    redrawn = draw(changed, 4, seed=3, record=record)
    gone = [mutant for mutant in record.mutants if locate(mutant, changed) is None]
    assert gone
    assert list(redrawn.gone) == gone
    assert len(redrawn.mutants) == 4
    numbers = {mutant.number for mutant in redrawn.mutants}
    assert not numbers & {mutant.number for mutant in gone}


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


def test_lines_of_gives_expression_and_statement_lines(write_modules):
    box_sites = write_modules(box=BOX)
    [minus] = [site for site in box_sites if site.mutation.text == "(a + b)"]
    name, expression_lines, statement_lines = lines_of(minus)
    assert (name, expression_lines, statement_lines) == ("box.py", range(7, 9), range(6, 10))
    [greater] = [site for site in box_sites if site.mutation.text == "(a >= 0)"]
    assert lines_of(greater)[1:] == (range(4, 5), range(4, 5))


def test_tests_of_a_line_are_passing_and_fastest_first(tmp_path):
    entries = [
        {"test": "", "lines": {"box.py": [1, 2]}},
        {"test": "slow", "lines": {"box.py": [4, 7]}},
        {"test": "quick", "lines": {"box.py": [4]}},
        {"test": "failing", "lines": {"box.py": [4]}},
        *({"test": t, "seconds": s, "passed": True} for t, s in (("slow", 9.0), ("quick", 1.0))),
        {"test": "failing", "seconds": 0.1, "passed": False},
    ]
    path = tmp_path / "contexts.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    contexts = Contexts.read(path)
    assert contexts.tests_of("box.py", range(4, 5)) == ["quick", "slow"]
    assert contexts.tests_of("box.py", range(8, 9), range(6, 9)) == ["slow"]
    assert contexts.tests_of("box.py", range(2, 3)) == ["quick", "slow"]  # imported by all
    assert contexts.tests_of("box.py", range(30, 31)) == []
    assert affordable(["quick", "slow"], contexts.seconds, 12.0) == ["quick"]
    assert affordable(["quick", "slow"], contexts.seconds, 30.0) == ["quick", "slow"]


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
