# SPDX-License-Identifier: Apache-2.0
"""Failing trackers leave the training metrics unchanged."""

from __future__ import annotations

import errno
import statistics
import sys
import threading
from pathlib import Path

import pytest

import megatron.training.monitoring.metrics as background
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import flags, run_in_process, timeless, write_tokens
from tests.support.trackers import fake_mlflow, fake_wandb

SHORT = "--train-iters 12 --eval-interval 6"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The token files, and the metrics of a run without trackers."""
    folder = tmp_path_factory.mktemp("healthy")
    prefix = write_tokens(folder / "tokens")
    assert run_in_process(flags(prefix, f"{SHORT} --save {folder / 'save'}")) == 0
    return prefix, folder / "save" / "metrics.jsonl"


def seconds(metrics: Path) -> float:
    """Return the median time of a step."""
    steps = [e["seconds_per_iteration"] for e in read_metrics(metrics) if e["kind"] == "train"]
    return statistics.median(steps)


@pytest.mark.parametrize("fault", ["unreachable", "no answer", "disk full"])
def test_failing_trackers_do_not_affect_training(healthy, tmp_path, monkeypatch, capsys, fault):
    """W&B, MLflow and TensorBoard are unreachable, hang, or have a full disk."""
    prefix, expected = healthy
    gate = threading.Event()

    def broken():
        if fault == "no answer":
            gate.wait(60)
        raise OSError(
            *((errno.ENOSPC, "No space left on device") if fault == "disk full" else ("refused",))
        )

    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(init=broken))
    for name, module in fake_mlflow(connect=broken).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        "torch.utils.tensorboard.SummaryWriter.__init__", lambda self, **options: broken()
    )
    monkeypatch.setattr(
        background.Background.__init__, "__kwdefaults__", {"capacity": 5, "close_seconds": 0.5}
    )
    save = tmp_path / "save"
    trackers = f"--tensorboard-dir {tmp_path / 'tb'} --wandb-project p --mlflow-experiment e"
    assert run_in_process(flags(prefix, f"{SHORT} --save {save} {trackers}")) == 0
    gate.set()
    metrics = save / "metrics.jsonl"
    assert timeless(metrics) == timeless(expected)
    warnings = [s for s in capsys.readouterr().err.splitlines() if s.startswith("metrics:")]
    # Match the exact warning: a tracker of the previous test may still print something.
    message = {
        "unreachable": "is disabled: OSError: refused",
        "no answer": "does not keep up",
        "disk full": "is disabled: OSError: [Errno 28]",
    }[fault]
    for tracker in ("W&B", "MLflow", "TensorBoard"):
        assert len([w for w in warnings if w.startswith(f"metrics: {tracker} {message}")]) == 1
    # A step takes milliseconds; a step that waited for a tracker would take far longer.
    assert seconds(metrics) < 4 * seconds(expected) + 0.05
