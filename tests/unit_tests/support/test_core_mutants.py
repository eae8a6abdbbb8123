# SPDX-License-Identifier: Apache-2.0
"""Mutants of a record are found again after their code has moved, and redrawn where it is gone."""

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
OTHER = """
    def half(a):
        return a + 2
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write modules into a folder that is imported from, and return what can be mutated in them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tools.core_mutants.record.core_folder", tmp_path.resolve)

    def write(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return sites(modules)

    return write


def _one(found, after):
    [site] = [site for site in found if site.mutation.text == after]
    record = draw([site], 1, seed=1)
    return record.mutants[0]


def test_edit_is_located_where_its_method_moved(written):
    mutant = _one(written(box=BOX, other=OTHER), "(a + b)")
    moved = written(box="", other=OTHER + BOX)
    assert locate(mutant, moved).mutation.module == "other"
    deeper = "    class Outer:" + textwrap.indent(BOX, "    ")
    assert locate(mutant, written(box=deeper)).mutation.function == "Outer.Box.volume"
    assert locate(mutant, written(box=BOX, other="")).mutation.module == "box"


def test_edit_is_located_in_renamed_class_of_same_method(written):
    mutant = _one(written(box=BOX), "(a * 2)")
    moved = written(box="", other=OTHER + BOX.replace("Box", "Crate").replace("half", "_half"))
    found = locate(mutant, moved)
    assert (found.mutation.module, found.mutation.function) == ("other", "Crate._half")


def test_different_edit_does_not_match(written):
    mutant = _one(written(box=BOX), "(a * 2)")
    assert locate(mutant, written(box="", other=OTHER)) is None


def test_edit_on_changed_line_is_located_if_unique(written):
    mutant = _one(written(box=BOX), "(a * 2)")
    once = BOX.replace("return a // 2", "return 1 + a // 2")
    twice = BOX.replace("return a // 2", "return (1 + a // 2, a // 2)")
    assert locate(mutant, written(box=once)).line == "return 1 + a // 2"
    assert locate(mutant, written(box=twice)) is None


def test_second_of_two_equal_edits_on_a_line_is_distinguished(written):
    twice = BOX.replace("return a // 2", "return (a // 2, a // 2)")
    found = [site for site in written(box=twice) if site.mutation.text == "(a * 2)"]
    second = replace(draw(found[1:], 1, seed=1).mutants[0])
    assert second.occurrence == 2
    assert locate(second, found) == found[1]


def test_a_draw_is_repeatable_and_replaces_what_is_gone(written, tmp_path):
    found = written(box=BOX)
    record = draw(found, 4, seed=3)
    assert record == draw(list(reversed(found)), 4, seed=3)
    record.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == record
    text = BOX.replace("a - b", "a").replace("- b", "").replace("a * a", "b")
    changed = written(box=text, other=OTHER)
    again = draw(changed, 4, seed=3, record=record)
    lost = [mutant for mutant in record.mutants if locate(mutant, changed) is None]
    assert lost
    assert list(again.gone) == lost
    assert len(again.mutants) == 4
    numbers = {mutant.number for mutant in again.mutants}
    assert not numbers & {mutant.number for mutant in lost}


def test_drop_in_killed_mutants_is_reported_by_name(written):
    drawn = draw(written(box=BOX), 3, seed=3)
    first, second, third = drawn.mutants
    old = Record(3, (replace(first, verdict=KILLED), replace(second, verdict=SURVIVED), third))
    moved = (replace(first, verdict=SURVIVED), replace(second, verdict=KILLED), third)
    lines, fewer = compare(old, Record(3, moved))
    assert not fewer
    assert sum(line.startswith("killed before, survived now: 1.") for line in lines) == 1
    assert compare(old, Record(3, (replace(first, verdict=SURVIVED), second, third)))[1]


def test_lines_are_those_of_the_expression_then_of_its_statement(written):
    found = written(box=BOX)
    [minus] = [site for site in found if site.mutation.text == "(a + b)"]
    name, own, around = lines_of(minus)
    assert (name, own, around) == ("box.py", range(7, 9), range(6, 10))
    [greater] = [site for site in found if site.mutation.text == "(a >= 0)"]
    assert lines_of(greater)[1:] == (range(4, 5), range(4, 5))


def test_tests_of_a_line_passed_and_come_quickest_first(tmp_path):
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


def test_recheck_runs_former_killer_at_its_new_path(written):
    found = written(one=BOX)
    drawn = draw(found, 3, seed=1).mutants
    killed = replace(drawn[0], verdict=KILLED, by="tests/old/test_core_mutants.py::test_killer")
    gone = replace(drawn[1], verdict=KILLED, by="tests/x.py::test_killer", number=2)
    survived = replace(drawn[2], verdict=SURVIVED)
    contexts = Contexts()
    places = {killed.number: found[0]}
    chosen = rechecks([killed, gone, survived], lambda m: places.get(m.number), contexts)
    test = "tests/unit_tests/support/test_core_mutants.py::test_killer"
    assert [(case.mutant, case.tests) for case in chosen] == [(killed, [test])]
    assert test in contexts.seconds
    lost = replace(killed, by="tests/no_such_file.py::test_killer")
    with pytest.raises(ValueError, match="no_such_file"):
        rechecks([lost], lambda m: places.get(m.number), contexts)
