# SPDX-License-Identifier: Apache-2.0
"""Diverged replicas of weights and optimizer state."""

from __future__ import annotations

import functools
import json
import re
import socket

import pytest
import torch

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import (
    latest_checkpoint,
    optimizer_chunks,
    weight_chunks,
)
from megatron.training import train_steps
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.planted_faults import run_with
from tests.functional_tests.small_run import flags, run_on, running

INTERVAL = "--check-weight-hash-across-dp-replicas-interval"
SHORT = "--train-iters 6 --lr-decay-iters 40 --eval-interval 0"
ZERO = "--data-parallel-sharding-strategy"
MOE = "--num-experts 4 --expert-model-parallel-size 2"
BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
NORM = "decoder.final_norm.weight"
HOST = socket.gethostname()


def plant_flip(rank: int, *, victim: int, name: str, step: int) -> None:
    """Flip one bit of a rank's chunk of a tensor after a step."""
    if rank != victim:
        return
    take_step, count = train_steps.SessionSteps.take_step, [0]

    def faulty(self, *args, **kwargs):
        report = take_step(self, *args, **kwargs)
        count[0] += 1
        if count[0] == step:
            session = self._session
            session.step.engine.complete_weights()
            chunks = weight_chunks(session.model.store) + optimizer_chunks(session.optimizer)
            chunk = next(c for c in chunks if c.name == name)
            integers = {2: torch.int16, 4: torch.int32}[chunk.tensor.element_size()]
            chunk.tensor.detach().view(integers).view(-1)[-1] ^= 1 << 3
        return report

    train_steps.SessionSteps.take_step = faulty


def run_with_flip(argv, *, world, victim=1, name=NORM, step):
    """Run with a planted flip and return the single error line of the run."""
    plant = functools.partial(plant_flip, victim=victim, name=name, step=step)
    outcomes, logs = run_with(plant, argv, world=world)
    text = "".join(logs)
    assert [o.exit_code for o in outcomes] == [ExitCode.REPLICAS_DIFFER] * world, text
    assert "Traceback" not in text
    (line,) = re.findall("pretrain_gpt: replicas differ .*", text)
    return line


@pytest.mark.covers("replica check")
def test_diverged_replica_of_three_is_named_within_interval(prefix, tmp_path):
    save = tmp_path / "save"
    options = f"{SHORT} --global-batch-size 6 --save {save} --save-interval 2 {INTERVAL} 2"
    line = run_with_flip(flags(prefix, options), world=3, victim=2, step=3)
    start = "pretrain_gpt: replicas differ after iteration 4: "
    assert line.startswith(f"{start}rank 2 on {HOST} differs from ranks 0, 1 in {NORM}; "), line
    assert latest_checkpoint(save).name == "iter_0000002", "diverged replicas must not be saved"
    assert not (save / "stacks").exists(), "nobody was stuck"
    events = [e for e in read_metrics(save / "metrics.jsonl") if e["kind"] == "fault"]
    event_fields = {"replicas": 1.0, "persistent": 1.0, "first_rank": 2.0, "tensors": 1.0}
    assert events == [{"kind": "fault", "iteration": 4, **event_fields}]
    (line,) = (save / "faults.jsonl").read_text().splitlines()
    fault = json.loads(line)
    assert (fault["kind"], fault["verdict"], fault["iteration"]) == ("replicas", "persistent", 4)
    assert (fault["ranks"], fault["tensors"]) == ({"2": HOST}, [NORM])
    # The same command resumes from the previous checkpoint without the fault.
    with running(3, flags(prefix, f"{options} --load {save}")) as ranks:
        outcomes = ranks.outcomes(timeout=60)
        text = "".join(ranks.log(rank) for rank in range(3))
    assert [o.exit_code for o in outcomes] == [0] * 3, text
    assert "resuming at iteration 2" in text
    assert latest_checkpoint(save).name == "iter_0000006"


@pytest.mark.covers("replica check")
def test_both_of_two_differing_replicas_are_named(prefix):
    options = f"{SHORT} --overlap-param-gather {ZERO} optim {INTERVAL} 3"
    line = run_with_flip(flags(prefix, options), world=2, victim=0, step=3)
    message = f"rank 0 on {HOST} against rank 1 on {HOST} differ in {NORM}: one of them is wrong"
    assert message in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options", "victim", "name"),
    [
        (2, "", 0, f"optimizer.exp_avg/{NORM}"),
        (2, f"{ZERO} optim_grads", 1, NORM),
        (2, "--tensor-model-parallel-size 2", 1, NORM),
        (4, "--tensor-model-parallel-size 4", 3, "decoder.blocks.2.attention.key.weight"),
        (4, f"{ZERO} optim_grads_params --num-distributed-optimizer-instances 2", 2, "head.weight"),
        (4, "--pipeline-model-parallel-size 2", 3, "embedding.weight"),
        (4, MOE, 1, "decoder.blocks.3.moe.experts.up.weight"),
        (4, f"{MOE} {BIAS}", 1, "decoder.blocks.1.moe.router.expert_bias"),
    ],
)
@pytest.mark.covers("replica check")
def test_every_kind_of_replica_is_compared(prefix, world, options, victim, name):
    argv = flags(prefix, f"{SHORT} {INTERVAL} 1 {options}")
    if "pipeline" in options:
        argv.remove("--untie-embeddings-and-output-weights")
    line = run_with_flip(argv, world=world, victim=victim, name=name, step=2)
    assert name in line
    assert f"rank {victim} on" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, f"{ZERO} optim --overlap-param-gather --overlap-grad-reduce"),
        (2, "--bf16 --optimizer muon"),
        (2, "--context-parallel-size 2"),
        (4, f"{ZERO} optim --num-distributed-optimizer-instances 2"),
        (4, f"{ZERO} optim --pipeline-model-parallel-size 2"),
        (4, f"{MOE} {ZERO} optim"),
    ],
)
@pytest.mark.covers("replica check")
def test_equal_replicas_pass_the_check(prefix, world, options):
    run_on(world, flags(prefix, f"{SHORT} {INTERVAL} 1 {options}"))
