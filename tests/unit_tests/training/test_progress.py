# SPDX-License-Identifier: Apache-2.0
"""Which display a rank gets, and what it shows."""

from __future__ import annotations

import io

from megatron.training.monitoring.log_line import Live, Plain, Silent, open_display
from tests.unit_tests.training.test_log_line import RECORD


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_choice():
    assert isinstance(
        open_display("auto", enabled=False, total=9, completed=0, out=Terminal()), Silent
    )
    assert isinstance(
        open_display("auto", enabled=True, total=9, completed=0, out=io.StringIO()), Plain
    )
    assert isinstance(
        open_display("auto", enabled=True, total=9, completed=0, out=Terminal()), Live
    )
    assert isinstance(
        open_display("plain", enabled=True, total=9, completed=0, out=Terminal()), Plain
    )


def test_plain_shows_lines_only():
    out = io.StringIO()
    with open_display("plain", enabled=True, total=9, completed=0, out=out) as display:
        display.step(1, 2.0)
        display.log("a line", RECORD)
    assert out.getvalue() == "a line\n"


def test_live_shows_loss_speed_and_lines():
    out = Terminal()
    with open_display("live", enabled=True, total=3400, completed=4, out=out) as display:
        display.step(11, 8.5)
        display.log("a [line] of text")
        display.log("log line", RECORD)
    shown = out.getvalue()
    assert "a [line] of text" in shown
    assert "12/3400" in shown
    assert "loss 8.3125" in shown
    assert "100 tok/s" in shown
    assert "log line" not in shown
