# SPDX-License-Identifier: Apache-2.0
"""One run in every strategy and layout: each phase resumes from the last checkpoint, and the losses
match an uninterrupted single process."""

from __future__ import annotations

import time

import pytest

from megatron.core.dist_checkpointing import latest_checkpoint
from tests.functional_tests.planted_faults import at_step, running_with
from tests.functional_tests.small_run import (
    flags,
    losses,
    output_of,
    run_on,
    write_tokens,
)

COMMON = (
    "--eval-interval 0 --train-iters 12 --save-interval 1 "
    "--position-embedding-type learned_absolute --max-position-embeddings 29"
)
BUCKETS = "--ddp-bucket-size 4000"
TENSOR = "--tensor-model-parallel-size"
STRATEGY = "--data-parallel-sharding-strategy"
CUT = f"{STRATEGY} optim_grads_params --overlap-param-gather --overlap-grad-reduce"
HYBRID = "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"
PIPELINE = "--pipeline-model-parallel-size"
SHARED = f"--context-parallel-size 2 {TENSOR} 2 --sequence-parallel"
ZB_H1 = f"{PIPELINE} 4 --pipeline-schedule zb-h1 --pipeline-model-parallel-layout E|t|t|L"
#: Two virtual stages on each of two ranks, with cuts within layers.
INTERLEAVED = f"{PIPELINE} 2 --hybrid-layer-pattern *|-*|-| {TENSOR} 2 --sequence-parallel"

#: Processes, layout and exit iteration of each phase.
PHASES = (
    (2, f"{TENSOR} 2 {STRATEGY} optim --sequence-parallel {BUCKETS}", 4),
    (4, f"{SHARED} {CUT} --cp-comm-type a2a", 5),
    (4, f"{CUT} {HYBRID} --param-gather-prefetch-bytes 60000 --check-weight-gather", 6),
    (4, f"{ZB_H1} --ddp-bucket-size 900", 7),
    (4, f"{INTERLEAVED} --overlap-grad-reduce {BUCKETS}", 9),
    (4, f"{TENSOR} 2 {STRATEGY} optim_grads --no-overlap-grad-reduce {BUCKETS}", 10),
    (4, f"{TENSOR} 4 --sequence-parallel {BUCKETS}", 11),
    (1, BUCKETS, 12),
)


def plant_pause(rank: int) -> None:
    at_step(3, lambda steps: time.sleep(600))


@pytest.mark.timeout(300)
@pytest.mark.covers("matches a single process")
@pytest.mark.covers("resume on another layout")
@pytest.mark.gpus(4)
def test_run_resumes_across_strategies_and_layouts(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "parts"
    plain = COMMON.replace("--save-interval 1", BUCKETS)
    run_on(1, flags(prefix, f"{plain} --metrics-file {whole}"))
    expected = losses(whole)
    assert expected[12] < expected[2] - 0.1, "the model has not learnt anything"

    argv = flags(prefix, f"{COMMON} {CUT} --save {resumed}")
    with running_with(plant_pause, argv, world=4) as ranks:
        deadline = time.monotonic() + 60
        while (
            not resumed.is_dir()
            or latest_checkpoint(resumed, say=print) != resumed / "iter_0000002"
        ):
            assert time.monotonic() < deadline, [ranks.log(rank) for rank in range(4)]
            time.sleep(0.01)
        for rank in range(4):
            ranks.kill(rank)
    for world, layout, exit_iteration in PHASES:
        options = (
            f"{COMMON} {layout} --save {resumed} --load {resumed} --exit-interval {exit_iteration}"
        )
        if layout.startswith(INTERLEAVED):
            output = output_of(world, flags(prefix, options))
            assert "pipeline parallel 2 (interleaved), 1+1|2+0 blocks" in output
        else:
            run_on(world, flags(prefix, options))
        actual = losses(resumed / "metrics.jsonl")
        assert max(actual) == exit_iteration
    assert actual.keys() == expected.keys()
    for iteration, loss in actual.items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration
