# SPDX-License-Identifier: Apache-2.0
"""The loss curve: the numbers it draws and the PNG it writes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.training.metrics import open_metrics
from megatron.training.plot import loss_curves, plot_loss


@pytest.fixture
def metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = open_metrics(
        metrics_file=str(path), tensorboard_dir=None, resume_iteration=0, warn=pytest.fail
    )
    metrics.write("validation", 0, {"lm_loss": 8.3})
    for iteration in range(1, 6):
        metrics.write("train", iteration, {"lm_loss": 8.0 / iteration, "grad_norm": 1.0})
    metrics.write("train", 6, {"grad_norm": float("inf")})  # a skipped step has no loss
    metrics.write("validation", 5, {"lm_loss": 2.0})
    metrics.close()
    return path


def test_curves(metrics_file):
    assert loss_curves(metrics_file) == {
        "validation": ([0, 5], [8.3, 2.0]),
        "training": ([1, 2, 3, 4, 5], [8.0, 4.0, 8.0 / 3, 2.0, 1.6]),
    }


def test_png(metrics_file, tmp_path):
    from matplotlib.image import imread

    image = imread(plot_loss(metrics_file, tmp_path / "out" / "loss.png"))
    assert image.shape[0] > 200
    assert image.min() < 0.5, "nothing is drawn"


def test_no_losses_is_one_line(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron.training.plot",
            "--metrics",
            str(tmp_path / "empty.jsonl"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "holds no losses" in done.stderr
    assert done.stderr.count("\n") == 1
