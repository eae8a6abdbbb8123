# SPDX-License-Identifier: Apache-2.0
"""Metrics writers opened by a run's options: trackers, resumed ids, default folder, secrets."""

from __future__ import annotations

import datetime
import os
import sys

import pytest

from megatron.training.monitoring.metrics import read_metrics, redacted
from megatron.training.observation import run_metrics
from tests.support.trackers import fake_mlflow, fake_wandb
from tests.unit_tests.training.small_config import small_config

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)


def record(flags, *, resume=0, warn=pytest.fail, options=None):
    metrics, path = run_metrics(
        small_config(flags).logging,
        options=options or {"lr": 0.5, "data-path": ["a", "b"]},
        resume_iteration=resume,
        warn=warn,
        now=NOW,
    )
    metrics.write("train", resume + 1, {"lm_loss": 2.5})
    metrics.close()
    return path


def test_wandb_receives_options_and_metrics(tmp_path, monkeypatch):
    wandb = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = f"--wandb-project p --wandb-exp-name n --wandb-entity e --wandb-save-dir {tmp_path}/w"
    flags += f" --metrics-file {tmp_path}/metrics.jsonl"
    record(flags)
    (init, arguments), *log_calls = wandb.calls
    assert init == "init"
    assert arguments["settings"].console == "off"
    expected = {"project": "p", "name": "n", "entity": "e", "dir": f"{tmp_path}/w", "id": None}
    assert expected.items() <= arguments.items()
    assert arguments["config"] == {"lr": 0.5, "data-path": ["a", "b"]}
    assert log_calls[-2:] == [("log", {"iteration": 1, "train/lm_loss": 2.5}), ("finish", None)]
    wandb.calls.clear()
    record(flags, resume=4)
    arguments = wandb.calls[0][1]
    assert (arguments["id"], arguments["resume"]) == ("made1", "allow"), (
        "a resumed run continues the tracker's run"
    )
    wandb.calls.clear()
    record(flags)
    assert wandb.calls[0][1]["id"] is None, "a new run in the same folder is a new tracker run"


def test_mlflow_receives_options_and_metrics(tmp_path, monkeypatch):
    for name, module in fake_mlflow().items():
        monkeypatch.setitem(sys.modules, name, module)
    calls = sys.modules["mlflow"].calls
    flags = "--mlflow-experiment e --mlflow-run-name n --mlflow-tracking-uri http://h:5000"
    flags += f" --metrics-file {tmp_path}/metrics.jsonl"
    record(flags, options={f"option-{i}": "x" * 600 for i in range(150)})
    assert calls[0] == ("client", "http://h:5000")
    assert ("create_experiment", "e") in calls
    assert ("create_run", ("7", "n")) in calls
    param_batches = [params for name, (*_, params) in (c for c in calls if c[0] == "log_batch")]
    assert sum(len(p) for p in param_batches) == 150
    assert all(len(value) == 500 for params in param_batches for _, value in params)
    assert calls[-2:] == [
        ("log_batch", ("run1", [("train/lm_loss", 2.5, 1)], [])),
        ("set_terminated", "run1"),
    ]
    calls.clear()
    record(flags, resume=4)
    assert calls[1] == ("update_run", ("run1", "RUNNING"))
    assert not any(name == "create_run" for name, _ in calls)


@pytest.mark.parametrize(
    ("module", "flags", "fix"),
    [
        ("wandb", "--wandb-project p", "pip install wandb"),
        ("mlflow", "--mlflow-experiment e", "pip install mlflow-skinny"),
    ],
)
def test_absent_tracker_library_is_one_warning(tmp_path, monkeypatch, module, flags, fix):
    monkeypatch.setitem(sys.modules, module, None)
    warnings = []
    path = record(f"{flags} --metrics-file {tmp_path}/m.jsonl", warn=warnings.append)
    assert len(warnings) == 1
    assert fix in warnings[0]
    assert len(read_metrics(path)) == 1


def test_run_without_a_folder_gets_a_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = record("")
    assert path == f"runs/2026-01-02T03-04-05-{os.getpid()}/metrics.jsonl"
    assert len(read_metrics(path)) == 1


def test_secrets_are_redacted_from_library_messages(tmp_path, monkeypatch):
    def refuse():
        raise OSError("401 for key s3cr3t-key-0123 at https://ann:pw@host/x")

    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-key-0123")
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(init=refuse))
    warnings = []
    record(f"--wandb-project p --metrics-file {tmp_path}/m.jsonl", warn=warnings.append)
    assert len(warnings) == 1
    assert "401 for key *** at https://***@host/x" in warnings[0]


def test_only_values_of_secret_variables_are_redacted():
    environment = {
        "HF_TOKEN": "abcdef123",
        "TOKENIZERS_PARALLELISM": "false-ish",
        "MY_KEY": "short",
    }
    text = redacted("abcdef123 false-ish short", environment)
    assert text == "*** false-ish short"


def test_password_of_a_refused_tracking_uri_is_not_printed():
    with pytest.raises(ValueError, match="--mlflow-tracking-uri") as error:
        small_config("--mlflow-experiment e --mlflow-tracking-uri https://ann:pw@h")
    assert "pw@" not in str(error.value)
