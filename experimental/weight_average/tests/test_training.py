# SPDX-License-Identifier: Apache-2.0
"""The experiment does not change training, and validates the average of the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import read_manifest, weight_chunks
from megatron.training import pretraining
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import flags, losses, run_in_process, run_on, write_tokens

HALF_LIFE = 12.0
BATCH = 8
RUN = f"--global-batch-size {BATCH} --train-iters 6 --eval-interval 3"
WITH = "--experiment weight_average --experiment-option weight_average.half_life_samples=12"
PREFIX = "experiment.weight_average/"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def run(prefix, tmp_path_factory) -> Path:
    """Train with the experiment, saving after every step, and return the folder."""
    folder = tmp_path_factory.mktemp("run")
    assert run_in_process(flags(prefix, f"{RUN} {WITH} --save {folder} --save-interval 1")) == 0
    return folder


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the fp32 and int64 tensors of a checkpoint of one process, weights included."""
    tensors_by_name = {}
    for name, tensor in read_manifest(checkpoint).tensors.items():
        (chunk,) = tensor.chunks
        content = (checkpoint / chunk.file).read_bytes()[chunk.begin : chunk.end]
        kind = np.int64 if name.endswith("/updates") else np.float32
        tensors_by_name[name] = torch.from_numpy(np.frombuffer(content, kind).copy()).view(
            tensor.shape
        )
    return tensors_by_name


def averages(folder: Path, prefix: Path) -> list[dict[str, torch.Tensor]]:
    """Return the fp64 average after each step, computed from the saved weights."""
    saved = [tensors(folder / f"iter_{i:07d}") for i in range(1, 7)]
    names = [name for name in saved[0] if "/" not in name]
    decay = 0.5 ** (BATCH / HALF_LIFE)
    # The initial weights are not saved, so the recursion starts from the first saved average.
    averages_by_step = [{name: saved[0][f"{PREFIX}{name}"].double() for name in names}]
    for state in saved[1:]:
        previous = averages_by_step[-1]
        averages_by_step.append(
            {n: decay * previous[n] + (1.0 - decay) * state[n].double() for n in names}
        )
    return averages_by_step


def validations(metrics: Path) -> dict[int, float]:
    """Return the validation losses of the average by iteration."""
    events = [event for event in read_metrics(metrics) if event["kind"] == "validation"]
    return {e["iteration"]: e["weight_average_lm_loss"] for e in events if e["iteration"]}


def test_training_losses_do_not_depend_on_the_experiment(run, prefix, tmp_path):
    assert run_in_process(flags(prefix, f"{RUN} --save {tmp_path}")) == 0
    for kind in ("train", "validation"):
        assert losses(run / "metrics.jsonl", kind) == losses(tmp_path / "metrics.jsonl", kind)
    updates = [e["weight_average_updates"] for e in read_metrics(run / "metrics.jsonl")
               if e["kind"] == "train"]  # fmt: skip
    assert updates == [0, 1, 2, 3, 4, 5], "a log line precedes the update of its step"


def test_saved_average_matches_the_saved_weights(run, prefix):
    for step, expected in enumerate(averages(run, prefix), start=1):
        saved = tensors(run / f"iter_{step:07d}")
        assert saved[f"{PREFIX}updates"].item() == step
        for name, average in expected.items():
            actual = saved[f"{PREFIX}{name}"].double()
            torch.testing.assert_close(actual, average, rtol=0, atol=1e-6)
            if step > 1:
                assert not torch.allclose(actual, saved[name].double(), rtol=0, atol=1e-5), name


def test_validation_uses_the_averaged_weights(run, prefix, tmp_path, monkeypatch):
    """The loss equals the loss of a model with the average of the saved weights."""
    expected, restore = averages(run, prefix)[-1], pretraining.restore

    def averaged(session):
        restored = restore(session)
        for chunk in weight_chunks(session.model.store):
            chunk.tensor.copy_(expected[chunk.name])
        return restored

    monkeypatch.setattr(pretraining, "restore", averaged)
    metrics = tmp_path / "metrics.jsonl"
    options = f"--load {run} --finetune --exit-interval 1 --metrics-file {metrics}"
    assert run_in_process(flags(prefix, f"{RUN} {options}")) == 0
    loss = validations(run / "metrics.jsonl")[6]
    assert loss == pytest.approx(losses(metrics, "validation")[0], rel=1e-6)
    assert loss != pytest.approx(losses(run / "metrics.jsonl", "validation")[6], rel=1e-3)


def test_resumed_run_continues_the_average(run, prefix, tmp_path, capsys):
    save = f"{RUN} --save {tmp_path} --load {tmp_path}"
    assert run_in_process(flags(prefix, f"{save} {WITH} --exit-interval 4")) == 0
    assert run_in_process(flags(prefix, f"{save} {WITH}")) == 0
    losses_by_iteration = validations(tmp_path / "metrics.jsonl")
    assert losses_by_iteration[6] == validations(run / "metrics.jsonl")[6]
    capsys.readouterr()
    options = f"--train-iters 7 --metrics-file {tmp_path / 'without.jsonl'} --save-interval 7"
    assert run_in_process(flags(prefix, f"{save} {options}")) == 0
    printed = capsys.readouterr()
    assert "--experiment weight_average: continuing without" in printed.out + printed.err


@pytest.mark.parametrize(
    "strategy", ["optim", pytest.param("optim_grads_params", marks=pytest.mark.slow(seconds=10))]
)
def test_sharded_ranks_match_unsharded_losses(run, prefix, tmp_path, strategy):
    options = f"{RUN} --data-parallel-sharding-strategy {strategy} --overlap-param-gather"
    run_on(2, flags(prefix, f"{options} --save {tmp_path}/with {WITH}"))
    run_on(2, flags(prefix, f"{options} --save {tmp_path}/without"))
    metrics = tmp_path / "with/metrics.jsonl"
    for kind in ("train", "validation"):
        assert losses(metrics, kind) == losses(tmp_path / "without/metrics.jsonl", kind)
    assert validations(metrics) == pytest.approx(validations(run / "metrics.jsonl"), rel=1e-4)
