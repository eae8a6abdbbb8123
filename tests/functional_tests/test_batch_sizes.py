# SPDX-License-Identifier: Apache-2.0
"""Runs with a batch size schedule, and evaluation with a separate batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets import GPTBatch
from megatron.core.dist_checkpointing import read_extra
from megatron.training.layouts import layouts_of
from megatron.training.monitoring.metrics import read_metrics
from megatron.training.train_steps import SessionSteps, microbatch
from tests.functional_tests.small_run import digests, flags, losses, run_on, timeless, write_tokens

#: With 24 tokens per sample: 4 up to sample 8, 12 up to sample 30 (within a step), then 8.
STEPS = "--step-batch-size-schedule 0:4 192:12 720:8"
SIZES = [4, 4, 12, 12, 8, 8, 8, 8]


def sizes_of(metrics: Path, *, start: int = 0) -> list[int]:
    """Return the batch sizes that a run logged, after comparing them with its consumed samples.

    Args:
        start: samples consumed before the run.
    """
    events = [event for event in read_metrics(metrics) if event["kind"] == "train"]
    consumed = [start, *(event["consumed_samples"] for event in events)]
    sizes = [event["global_batch_size"] for event in events]
    assert np.diff(consumed).tolist() == sizes
    return sizes


@pytest.mark.gpus(2)
def test_resumed_run_follows_the_batch_size_schedule(tmp_path):
    """Stop on two ranks within a stage and resume on one rank with twice the microbatches."""
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut, single_rank = (tmp_path / name for name in ("whole", "cut", "other"))
    common = f"--train-iters 8 --eval-interval 0 --lr-warmup-iters 3 {STEPS}"

    def argv(options: str) -> list[str]:
        return flags(prefix, f"{common} {options}", without=["--global-batch-size"])

    run_on(2, argv(f"--save {whole}"))
    sizes = sizes_of(whole / "metrics.jsonl")
    assert sizes == SIZES
    run_on(2, argv(f"--save {cut} --exit-interval 3"))
    run_on(2, argv(f"--save {cut} --load {cut}"))
    assert digests(cut / "iter_0000008") == digests(whole / "iter_0000008")
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    for field in ("progress", "window"):
        whole_extra, cut_extra = (read_extra(folder / "iter_0000008") for folder in (whole, cut))
        assert whole_extra[field] == cut_extra[field]
    run_on(1, argv(f"--save {single_rank} --load {cut / 'iter_0000003'}"))
    assert sizes_of(single_rank / "metrics.jsonl", start=sum(sizes[:3])) == sizes[3:]
    expected = losses(whole / "metrics.jsonl")
    for iteration, loss in losses(single_rank / "metrics.jsonl").items():
        assert loss == pytest.approx(expected[iteration], rel=1e-5)


def reference_loss(steps: SessionSteps, samples: int) -> float:
    """Return the mean loss of the first validation samples, computed one at a time."""
    session = steps._session
    layouts = layouts_of(session.run, session.context, session.model.config)
    total = tokens = 0.0
    for i in range(samples):
        rows = session.data.validation.read(np.array([i]))
        sample = GPTBatch(
            tokens=torch.from_numpy(rows.tokens),
            loss_mask=torch.from_numpy(rows.loss_mask),
            sample_ids=torch.tensor([i]),
        )
        batch = microbatch(sample, torch.device("cpu"), layouts=layouts)
        with torch.no_grad():
            logits = session.model.full_logits(batch.tokens, layout=batch.without_dropout)
        nll = torch.nn.functional.cross_entropy(
            logits[:, 0], batch.labels[0], reduction="none"
        )  # [s]
        total += float((nll * batch.loss_mask[0]).sum())
        tokens += float(batch.loss_mask.sum())
    return total / tokens


def test_evaluation_uses_its_own_batch_size(tmp_path, monkeypatch):
    """Three batches of 10 samples, in microbatches of several sizes, on one and two ranks."""
    prefix = write_tokens(tmp_path / "tokens", documents=90)
    options = "--eval-global-batch-size 10 --eval-iters 3 --train-iters 4 --eval-interval 4"
    loss_on, compared_losses = SessionSteps.loss_on, []

    def record_losses(self, split):
        loss = loss_on(self, split)
        if split == "validation":
            compared_losses.append((loss, reference_loss(self, 30), reference_loss(self, 24)))
        return loss

    expected: list[float] = []
    for world, micro_batch_size in ((1, 2), (1, 5), (2, 1)):
        metrics = tmp_path / f"{world}-{micro_batch_size}.jsonl"
        argv = flags(
            prefix, f"{options} --eval-micro-batch-size {micro_batch_size} --metrics-file {metrics}"
        )
        with monkeypatch.context() as patch:
            if world == 1:
                patch.setattr(SessionSteps, "loss_on", record_losses)
            run_on(world, argv)
        expected = [reference for _, reference, _ in compared_losses][-2:]
        validated = losses(metrics, "validation")
        assert list(validated) == [0, 4]
        assert list(validated.values()) == pytest.approx(expected, rel=1e-6)
    # Three training-size batches, of 8, cover other samples.
    assert all(
        abs(reference - of_24_samples) > 1e-4 for _, reference, of_24_samples in compared_losses
    )
