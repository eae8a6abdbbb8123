# SPDX-License-Identifier: Apache-2.0
"""Runs whose global batch changes its size, and evaluations in batches of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.samplers import GPTBatch
from megatron.core.dist_checkpointing import read_extra
from megatron.training.layouts import layouts_of
from megatron.training.monitoring.metrics import read_metrics
from megatron.training.session import SessionSteps, microbatch
from tests.functional_tests.small_run import (
    digests,
    flags,
    losses,
    run_on,
    timeless,
    write_tokens,
)

#: Of 24 tokens a sample: 4 up to sample 8, 12 up to sample 30, which a step goes beyond, then 8.
STEPS = "--step-batch-size-schedule 0:4 192:12 720:8"
SIZES = [4, 4, 12, 12, 8, 8, 8, 8]


def sizes_of(metrics: Path, *, first: int = 0) -> list[int]:
    """Return the batch sizes that a run logged, which its samples consumed agree with.

    Args:
        first: samples consumed before.
    """
    events = [event for event in read_metrics(metrics) if event["kind"] == "train"]
    consumed = [first, *(event["consumed_samples"] for event in events)]
    found = [event["global_batch_size"] for event in events]
    assert np.diff(consumed).tolist() == found
    return found


@pytest.mark.gpus(2)
def test_a_resumed_run_has_the_batches_of_the_uninterrupted(tmp_path):
    """On two ranks; stopped within a size and resumed on one rank of twice the microbatches."""
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut, other = (tmp_path / name for name in ("whole", "cut", "other"))
    common = f"--train-iters 8 --eval-interval 0 --lr-warmup-iters 3 {STEPS}"

    def argv(more: str) -> list[str]:
        return flags(prefix, f"{common} {more}", without=["--global-batch-size"])

    run_on(2, argv(f"--save {whole}"))
    found = sizes_of(whole / "metrics.jsonl")
    assert found == SIZES
    run_on(2, argv(f"--save {cut} --exit-interval 3"))
    run_on(2, argv(f"--save {cut} --load {cut}"))
    assert digests(cut / "iter_0000008") == digests(whole / "iter_0000008")
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    for part in ("progress", "window"):
        first, second = (read_extra(folder / "iter_0000008") for folder in (whole, cut))
        assert first[part] == second[part]
    run_on(1, argv(f"--save {other} --load {cut / 'iter_0000003'}"))
    assert sizes_of(other / "metrics.jsonl", first=sum(found[:3])) == found[3:]
    expected = losses(whole / "metrics.jsonl")
    for iteration, loss in losses(other / "metrics.jsonl").items():
        assert loss == pytest.approx(expected[iteration], rel=1e-5)


@pytest.mark.gpus(1)
def test_a_ramp_grows_to_the_global_batch(tmp_path):
    prefix, metrics = write_tokens(tmp_path / "tokens"), tmp_path / "metrics.jsonl"
    more = "--rampup-batch-size 2 2 18 --train-iters 6 --eval-interval 0"
    run_on(1, flags(prefix, f"{more} --metrics-file {metrics}"))
    assert sizes_of(metrics) == [2, 2, 2, 4, 4, 6]  # to 8 in thirds of 18 samples


@pytest.mark.gpus(1)
def test_a_schedule_is_runs_of_one_size_after_each_other(tmp_path):
    """Each stage is a run of its own, whose batch has one size; the bits are the same."""
    prefix = write_tokens(tmp_path / "tokens")
    common = "--train-samples 64 --eval-interval 0 --lr-decay-samples 60 --lr-warmup-samples 10"
    left_out = ["--train-iters", "--lr-warmup-iters", "--global-batch-size"]

    def argv(more: str) -> list[str]:
        return flags(
            prefix, f"{common} {more}", without=left_out if STEPS in more else left_out[:2]
        )

    run_on(1, argv(f"--save {tmp_path / 'one'} {STEPS}"))
    assert sizes_of(tmp_path / "one" / "metrics.jsonl") == SIZES
    folder, stages = tmp_path / "many", [(4, 2), (12, 4), (8, 8)]
    for size, end in stages:
        batch = f"--global-batch-size {size} --exit-interval {end}"
        run_on(1, argv(f"{batch} --save {folder} --load {folder}"))
    assert sizes_of(folder / "metrics.jsonl") == SIZES
    assert digests(folder / "iter_0000008") == digests(tmp_path / "one" / "iter_0000008")


@pytest.mark.parametrize("data", ["--mock-data", ""])
def test_no_samples_to_validate_on_are_no_validation(tmp_path, data):
    """As in scripts of Megatron-LM, which leave --eval-interval as it is."""
    metrics = tmp_path / "metrics.jsonl"
    argv = flags(
        write_tokens(tmp_path / "tokens"),
        f"{data} --eval-iters 0 --eval-interval 2 --train-iters 3 --metrics-file {metrics}",
        without=["--data-path", "--split"] if data else [],
    )
    run_on(1, argv)
    assert {event["kind"] for event in read_metrics(metrics)} & {"validation", "test"} == set()
    assert list(losses(metrics)) == [1, 2, 3]


def by_hand(steps: SessionSteps, samples: int) -> float:
    """Return the mean loss over the first validation samples, one at a time."""
    session = steps._session
    layouts = layouts_of(session.run, session.context, session.model.config)
    total = tokens = 0.0
    for i in range(samples):
        rows = session.data.validation.read(np.array([i]))
        one = GPTBatch(
            tokens=torch.from_numpy(rows.tokens),
            loss_mask=torch.from_numpy(rows.loss_mask),
            sample_ids=torch.tensor([i]),
        )
        batch = microbatch(one, torch.device("cpu"), layouts=layouts)
        with torch.no_grad():
            logits = session.model.full_logits(batch.tokens, layout=batch.without_dropout)
        nll = torch.nn.functional.cross_entropy(
            logits[:, 0], batch.labels[0], reduction="none"
        )  # [s]
        total += float((nll * batch.loss_mask[0]).sum())
        tokens += float(batch.loss_mask.sum())
    return total / tokens


def test_an_evaluation_takes_batches_of_its_own_size(tmp_path, monkeypatch):
    """Three batches of 10 samples, in microbatches of several sizes, on one and two ranks."""
    prefix = write_tokens(tmp_path / "tokens", documents=90)
    more = "--eval-global-batch-size 10 --eval-iters 3 --train-iters 4 --eval-interval 4"
    whole, found = SessionSteps.loss_on, []

    def compared(self, split):
        loss = whole(self, split)
        if split == "validation":
            found.append((loss, by_hand(self, 30), by_hand(self, 24)))
        return loss

    wanted: list[float] = []
    for world, micro in ((1, 2), (1, 5), (2, 1)):
        metrics = tmp_path / f"{world}-{micro}.jsonl"
        argv = flags(prefix, f"{more} --eval-micro-batch-size {micro} --metrics-file {metrics}")
        with monkeypatch.context() as patch:
            if world == 1:
                patch.setattr(SessionSteps, "loss_on", compared)
            run_on(world, argv)
        wanted = [hand for _, hand, _ in found][-2:]
        validated = losses(metrics, "validation")
        assert list(validated) == [0, 4]
        assert list(validated.values()) == pytest.approx(wanted, rel=1e-6)
    # Three of the run's own batches, of 8, are other samples.
    assert all(abs(hand - fewer) > 1e-4 for _, hand, fewer in found)
