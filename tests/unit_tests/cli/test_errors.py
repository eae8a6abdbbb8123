# SPDX-License-Identifier: Apache-2.0
"""How an entry point ends: codes, one line, one rank."""

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
def test_code_and_line(error, code, text):
    got, out, err = _run(error)
    assert (got, out.getvalue(), err.getvalue()) == (code, "", text)


def test_help_goes_to_stdout():
    got, out, err = _run(HelpRequested("usage\n"))
    assert (got, out.getvalue(), err.getvalue()) == (0, "usage\n", "")


def test_a_crash_keeps_its_traceback():
    got, _, err = _run(RuntimeError("odd"))
    assert got == ExitCode.CRASH
    assert "Traceback" in err.getvalue()


def test_a_rank_that_lost_the_claim_says_nothing():
    asked = []

    def silent(text):
        asked.append(text)
        return contextlib.nullcontext(False)

    got, _, err = _run(ValueError("x"), silent)
    assert (got, err.getvalue(), asked) == (ExitCode.USER_ERROR, "", ["error: x"])


def test_a_long_text_keeps_its_beginning_and_its_end():
    _, _, err = _run(ValueError("what is wrong " + "9" * 5000 + " and the fix"))
    line = err.getvalue()
    assert line.startswith("pretrain_gpt: error: what is wrong 9")
    assert line.endswith("9 and the fix\n")
    assert len(line) < 2000
