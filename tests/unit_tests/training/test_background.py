# SPDX-License-Identifier: Apache-2.0
"""Metric writers on background threads: order, failures, and a stalled writer delays no caller."""

from __future__ import annotations

import threading
import time

import pytest

from megatron.training.monitoring.metrics import Background, Metrics


class Collector:
    """Record the events written to it; wait for `gate` before each event."""

    def __init__(self, gate=None):
        self.seen, self.closed, self.gate = [], False, gate

    def write(self, kind, iteration, values):
        if self.gate is not None:
            self.gate.wait()
        self.seen.append((kind, iteration, values))

    def close(self):
        self.closed = True


def test_events_are_written_in_order_before_close_returns():
    collector = Collector()
    writer = Background("x", lambda: collector, warn=pytest.fail)
    for i in range(50):
        writer.write("train", i, {"a": float(i)})
    writer.close()
    assert collector.seen == [("train", i, {"a": float(i)}) for i in range(50)]
    assert collector.closed


def test_stalled_writer_blocks_no_caller_and_is_reported_once():
    gate, warnings = threading.Event(), []
    collector = Collector(gate)
    writer = Background(
        "server", lambda: collector, warn=warnings.append, capacity=5, close_seconds=0.2
    )
    for i in range(2000):
        writer.write("train", i, {})  # returns, although the gate is closed
    assert writer.dropped >= 2000 - 6
    writer.close()
    assert len(warnings) == 2
    assert "server does not keep up: 5 events are queued" in warnings[0]
    assert "server has not written everything within 0.2 s" in warnings[1]
    gate.set()  # lets the thread end


def test_several_stalled_writers_share_one_time_limit():
    gate, warnings = threading.Event(), []

    def stalled(name):
        return lambda: Background(
            name, lambda: Collector(gate), warn=warnings.append, close_seconds=1.0
        )

    metrics = Metrics({name: stalled(name) for name in "abcd"}, warnings.append)
    metrics.write("train", 1, {"x": 1.0})
    start = time.perf_counter()
    metrics.close()
    assert time.perf_counter() - start < 3.5  # not one second for each of four writers
    assert len(warnings) == 4
    gate.set()


@pytest.mark.parametrize("failing_call", ["connect", "write"])
def test_writer_thread_failure_is_one_warning(failing_call):
    class Broken(Collector):
        def write(self, kind, iteration, values):
            raise SystemExit("no\nserver")

    def connect():
        if failing_call == "connect":
            raise OSError("no\nserver")
        return Broken()

    warnings = []
    writer = Background("x", connect, warn=warnings.append)
    for i in range(3):
        writer.write("train", i, {})
        time.sleep(0.02)
    writer.close()
    error = "OSError" if failing_call == "connect" else "SystemExit"
    assert warnings == [f"metrics: x is disabled: {error}: no server; training continues"]
