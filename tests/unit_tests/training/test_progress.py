# SPDX-License-Identifier: Apache-2.0
"""The choice of a progress display, and the output of each."""

from __future__ import annotations

import io

from megatron.training.monitoring.log_line import Live, Plain, Silent, open_display
from tests.unit_tests.training.test_log_line import RECORD


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_display_is_chosen_by_option_and_terminal():
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


def test_plain_display_shows_only_log_lines():
    out = io.StringIO()
    with open_display("plain", enabled=True, total=9, completed=0, out=out) as display:
        display.step(1, 2.0)
        display.log("a line", RECORD)
    assert out.getvalue() == "a line\n"


def test_live_display_shows_loss_speed_and_messages():
    out = Terminal()
    with open_display("live", enabled=True, total=3400, completed=4, out=out) as display:
        display.step(11, 8.5)
        display.log("a [line] of text")
        display.log("log line", RECORD)
    output = out.getvalue()
    assert "a [line] of text" in output
    assert "12/3400" in output
    assert "loss 8.3125" in output
    assert "100 tok/s" in output
    assert "log line" not in output
