# SPDX-License-Identifier: Apache-2.0
"""How an entry point ends: exit codes, one error line, one reporting rank."""

from __future__ import annotations

import contextlib
import io

import pytest

from megatron.cli.errors import ExitCode, PeerLost, RunStopped, run_entry_point
from megatron.cli.flags import HelpRequested


def _run(error, report=lambda text: contextlib.nullcontext(True)):
    def main():
        if error is not None:
            raise error

    out, err = io.StringIO(), io.StringIO()
    return run_entry_point(main, prog="pretrain_gpt", report=report, out=out, err=err), out, err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (None, ExitCode.OK, ""),
        (ValueError("a\n  b"), ExitCode.USER_ERROR, "pretrain_gpt: error: a b\n"),
        (RunStopped(ExitCode.BAD_STEPS, "10 bad"), ExitCode.BAD_STEPS, "pretrain_gpt: 10 bad\n"),
        (PeerLost("rank 3"), ExitCode.PEER_LOST, "pretrain_gpt: rank 3\n"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "pretrain_gpt: interrupted\n"),
    ],
)
def test_each_error_has_its_exit_code_and_line(error, code, text):
    exit_code, out, err = _run(error)
    assert (exit_code, out.getvalue(), err.getvalue()) == (code, "", text)


def test_help_goes_to_stdout():
    exit_code, out, err = _run(HelpRequested("usage\n"))
    assert (exit_code, out.getvalue(), err.getvalue()) == (0, "usage\n", "")


def test_crash_prints_its_traceback():
    exit_code, _, err = _run(RuntimeError("odd"))
    assert exit_code == ExitCode.CRASH
    assert "Traceback" in err.getvalue()


def test_rank_that_may_not_report_prints_nothing():
    reports = []

    def silent(text):
        reports.append(text)
        return contextlib.nullcontext(False)

    exit_code, _, err = _run(ValueError("x"), silent)
    assert (exit_code, err.getvalue(), reports) == (ExitCode.USER_ERROR, "", ["error: x"])


def test_long_error_text_is_cut_in_the_middle():
    _, _, err = _run(ValueError("what is wrong " + "9" * 5000 + " and the fix"))
    line = err.getvalue()
    assert line.startswith("pretrain_gpt: error: what is wrong 9")
    assert line.endswith("9 and the fix\n")
    assert len(line) < 2000
