# SPDX-License-Identifier: Apache-2.0
"""A pytest session that omits a required test fails; the parts hold every test once."""

import pytest

from tests.support.complete import balanced_parts

pytest_plugins = ["pytester"]

STOPS = "def test_quick(): assert 0"
TESTS = """
import pytest

def test_quick(): pass
def test_skips(): pytest.skip("a quick one may")
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.gpu
def test_elsewhere(): assert False
@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.slow(seconds=n)) for n in (5, 40)])
def test_rows(n): pass
"""


@pytest.fixture
def outcome(pytester, monkeypatch):
    """Run tests with the plugin; return the exit code and the printed text."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  gpu\n")

    def run(tests, *flags):
        pytester.makepyfile(test_it=tests)
        completed = pytester.runpytest_inprocess(
            "-p", "tests.support.complete", "-p", "no:cacheprovider", "-m", "not gpu", *flags
        )
        return completed.ret, completed.stdout.str() + completed.stderr.str()

    return run


def test_complete_session_passes(outcome):
    code, text = outcome(TESTS)
    assert code == 0
    assert "complete: 5 of 5 tests ran" in text
    code, text = outcome(TESTS, "-m", "not slow and not gpu")
    assert code == 0
    assert "complete: 2 of 2 tests ran" in text


@pytest.mark.parametrize(
    ("tests", "flags", "named"),
    [
        (TESTS, ("-k", "quick"), "test_skips"),
        (TESTS, ("-m", "not quick and not gpu and slow"), "test_quick"),
        (TESTS, ("--deselect", "test_it.py::test_slow"), "test_slow"),
        (TESTS, ("--part", "3/2"), "3/2"),
        (TESTS.replace("def test_slow(): pass", "def test_slow(): pytest.skip()"), (), "test_slow"),
        (TESTS.replace("(5, 40)", "()"), (), "test_rows"),
        ("import pytest\npytest.importorskip('no_such_thing')\n", (), "test_it.py"),
        (TESTS.replace("def test_quick(): pass", STOPS), ("-x",), "test_slow"),
        ("def test_ends(): import pytest; pytest.exit('early', 0)", (), "test_ends"),
    ],
    ids=["-k", "-m", "deselected", "part", "skipped", "no parameters", "file", "stopped", "exited"],
)  # fmt: skip
def test_session_that_omits_a_test_fails(outcome, tests, flags, named):
    code, text = outcome(tests, *flags)
    assert code != 0
    assert named in text


def test_balanced_parts_hold_every_test_once(outcome):
    seconds = [5.0, 1.0, 9.0, 2.0, 2.0, 7.0, 3.0, 1.0]
    parts = balanced_parts(seconds, 3)
    assert sorted(n for indices in parts for n in indices) == list(range(8))
    assert {sum(seconds[n] for n in indices) for indices in parts} == {10.0}
    first_part, _ = outcome(TESTS, "--part", "1/2", "-v"), outcome(TESTS, "--part", "2/2")
    assert first_part[0] == 0
    assert "test_rows[40] PASSED" in first_part[1]
    assert "complete: 1 of 1 tests ran, part 1 of 2 of 5 tests" in first_part[1]
