# SPDX-License-Identifier: Apache-2.0
"""The training log line against the pattern of common log parsers."""

from __future__ import annotations

import dataclasses
import datetime
import io
import re

from megatron.training.hooks import LogPart
from megatron.training.monitoring.log_line import (
    Live,
    Plain,
    Silent,
    StepRecord,
    format_step,
    format_validation,
    open_display,
)

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
RECORD = StepRecord(
    iteration=12,
    train_iters=3400,
    consumed_samples=96,
    global_batch_size=8,
    seconds_per_iteration=0.123449,
    tokens_per_second=100.0,
    learning_rate=3e-4,
    lm_loss=8.31252,
    loss_scale=1.0,
    grad_norm=1.23456,
    num_skipped=2,
    num_nan=1,
)
FULL = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): (\d+\.\d) \| "
    r"throughput per GPU \(TFLOP/s/GPU\): (\d+\.\d) \| "
    r"learning rate: (\d\.\d{6}E[+-]\d\d) \| global batch size: +(\d+) \| "
    r"lm loss: (\d\.\d{6}E[+-]\d\d) \| loss scale: (\d+\.\d) \| grad norm: (\d+\.\d{3}) \| "
    r"num zeros: (\d+) \| params norm: (\d+\.\d{3}) \| "
    r"number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|"
)


def test_default_log_line_matches_exactly():
    assert format_step(RECORD, NOW) == (
        " [2026-01-02 03:04:05] iteration       12/    3400 | consumed samples:           96 | "
        "elapsed time per iteration (ms): 123.4 | learning rate: 3.000000E-04 | "
        "global batch size:     8 | lm loss: 8.312520E+00 | loss scale: 1.0 | grad norm: 1.235 | "
        "number of skipped iterations:   2 | number of nan iterations:   1 | "
        "tokens per second: 100 |"
    )


def test_full_log_line_matches_the_megatron_pattern():
    record = dataclasses.replace(RECORD, tflops=12.34, num_zeros=7, params_norm=42.0)
    match = FULL.match(format_step(record, NOW, throughput=True))
    assert match
    numbers = "12 3400 96 123.4 12.3 3.000000E-04 8 8.312520E+00 1.0 1.235 7 42.000 2 1"
    assert " ".join(match.groups()) == numbers


def test_throughput_is_optional_and_mfu_needs_known_peak():
    fast = dataclasses.replace(RECORD, tflops=500.0, mfu=0.505)
    assert "TFLOP" not in format_step(fast, NOW)
    assert "MFU" not in format_step(fast, NOW)
    assert format_step(fast, NOW, throughput=True).endswith(
        "nan iterations:   1 | tokens per second: 100 | MFU: 50.5% |"
    )
    unknown = dataclasses.replace(fast, mfu=None)
    assert "MFU" not in format_step(unknown, NOW, throughput=True)


def test_memory_fields_come_last():
    record = dataclasses.replace(RECORD, memory_bytes=1_499_600_000, peak_memory_bytes=2 * 10**9)
    assert format_step(record, NOW).endswith(
        "| tokens per second: 100 | memory (MB): 1,500 | peak memory (MB): 2,000 |"
    )


def test_model_sections_follow_the_standard_log_fields():
    sections = [LogPart("one: 1", {}), LogPart("two: 2 | three: 3", {})]
    line = format_step(RECORD, NOW, sections=sections)
    assert line == f"{format_step(RECORD, NOW)} one: 1 | two: 2 | three: 3 |"


def test_line_of_only_skipped_steps_has_no_loss():
    line = format_step(dataclasses.replace(RECORD, lm_loss=None, grad_norm=None), NOW)
    assert "lm loss" not in line
    assert "grad norm" not in line


def test_validation_line_has_loss_and_capped_perplexity():
    assert format_validation(50, 2.0) == (
        " validation loss at iteration 50 | lm loss value: 2.000000E+00 | "
        "lm loss PPL: 7.389056E+00 |"
    )
    assert "PPL: 4.851652E+08" in format_validation(1, 1000.0)


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
