# SPDX-License-Identifier: Apache-2.0
"""One run through every strategy and layout: each part goes on from the last one's checkpoint, and
has the losses of a single process that was never interrupted."""

from __future__ import annotations

import time

import pytest

from megatron.core.dist_checkpointing import latest_checkpoint
from tests.functional_tests.paused_run import hold
from tests.functional_tests.small_run import (
    flags,
    losses,
    output_of,
    rank_process,
    run_on,
    running,
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
#: Two virtual stages on each of two ranks, cut within layers too, by the launcher of real jobs.
INTERLEAVED = f"{PIPELINE} 2 --hybrid-layer-pattern *|-*|-| {TENSOR} 2 --sequence-parallel"

#: Processes, layout and last iteration of each part.
PARTS = (
    (2, f"{TENSOR} 2 {STRATEGY} optim --sequence-parallel {BUCKETS}", 4),
    (4, f"{SHARED} {CUT} --cp-comm-type a2a", 5),
    (4, f"{CUT} {HYBRID} --param-gather-prefetch-bytes 60000 --check-weight-gather", 6),
    (4, f"{ZB_H1} --ddp-bucket-size 900", 7),
    (4, f"{INTERLEAVED} --overlap-grad-reduce {BUCKETS}", 9),
    (4, f"{TENSOR} 2 {STRATEGY} optim_grads --no-overlap-grad-reduce {BUCKETS}", 10),
    (4, f"{TENSOR} 4 --sequence-parallel {BUCKETS}", 11),
    (1, BUCKETS, 12),
)


def paused_process(rank: int, world: int, port: int, argv: list[str]) -> None:
    """Be one rank of a run that waits in its third step."""
    hold(3)
    rank_process(rank, world, port, argv)


@pytest.mark.timeout(300)
@pytest.mark.covers("numbers of one process", runs="ranks")
@pytest.mark.covers("resumed on another layout", runs="loads")
@pytest.mark.gpus(4)
def test_every_strategy_and_layout_goes_on_within_a_millionth(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts"
    plain = COMMON.replace("--save-interval 1", BUCKETS)
    run_on(1, flags(prefix, f"{plain} --metrics-file {whole}"))
    expected = losses(whole)
    assert expected[12] < expected[2] - 0.1, "the model has not learnt anything"

    argv = flags(prefix, f"{COMMON} {CUT} --save {parts}")
    with running(4, argv, process=paused_process) as ranks:
        deadline = time.monotonic() + 60
        while not parts.is_dir() or latest_checkpoint(parts, say=print) != parts / "iter_0000002":
            assert time.monotonic() < deadline, [ranks.log(rank) for rank in range(4)]
            time.sleep(0.01)
        for rank in range(4):
            ranks.kill(rank)
    for world, layout, last in PARTS:
        more = f"{COMMON} {layout} --save {parts} --load {parts} --exit-interval {last}"
        if layout.startswith(INTERLEAVED):
            output = output_of(world, flags(prefix, more))
            assert "pipeline parallel 2 (interleaved), 1+1|2+0 blocks" in output
        else:
            run_on(world, flags(prefix, more))
        found = losses(parts / "metrics.jsonl")
        assert max(found) == last
    assert found.keys() == expected.keys()
    for iteration, loss in found.items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration
