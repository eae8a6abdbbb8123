# SPDX-License-Identifier: Apache-2.0
"""A session that leaves out a test that it should run fails; parts hold every test once."""

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
    """Run tests with the plugin; return the exit code and what was printed."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  gpu\n")

    def run(tests, *flags):
        pytester.makepyfile(test_it=tests)
        done = pytester.runpytest_inprocess(
            "-p", "tests.support.complete", "-p", "no:cacheprovider", "-m", "not gpu", *flags
        )
        return done.ret, done.stdout.str() + done.stderr.str()

    return run


def test_a_whole_session_passes(outcome):
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
    ids=["-k", "-m", "deselected", "part", "skipped", "no rows", "file", "stopped", "ended"],
)  # fmt: skip
def test_a_session_that_leaves_something_out_fails(outcome, tests, flags, named):
    code, text = outcome(tests, *flags)
    assert code != 0
    assert named in text


def test_parts_hold_every_test_once_and_last_as_long(outcome):
    seconds = [5.0, 1.0, 9.0, 2.0, 2.0, 7.0, 3.0, 1.0]
    found = balanced_parts(seconds, 3)
    assert sorted(n for part in found for n in part) == list(range(8))
    assert {sum(seconds[n] for n in part) for part in found} == {10.0}
    longest, _ = outcome(TESTS, "--part", "1/2", "-v"), outcome(TESTS, "--part", "2/2")
    assert longest[0] == 0
    assert "test_rows[40] PASSED" in longest[1]
    assert "complete: 1 of 1 tests ran, part 1 of 2 of 5 tests" in longest[1]
