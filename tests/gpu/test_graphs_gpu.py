# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of training steps equal eager steps, on one GPU and with NCCL on two."""

from __future__ import annotations

from typing import NoReturn
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.device import CudaRecorder
from megatron.core.distributed import DataParallelConfig, data_parallel
from megatron.training import core_configs
from tests.functional_tests.small_run import (
    flags,
    losses,
    rank_process,
    run_in_process,
    run_on,
    write_tokens,
)
from tests.support.ranks import start_ranks
from tests.unit_tests.training.graphed_runs import (
    EXPERTS,
    HYBRID,
    MODEL,
    REPLAYED,
    STEPS,
    WARMUP,
    WITHOUT_DROPOUT,
    build_step,
    prepare_too_early,
    run_steps,
    step_batches,
)

pytestmark = [pytest.mark.gpu, pytest.mark.machine]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

GRAPH = "--cuda-graph-impl full_iteration"
CAPACITY = "--moe-expert-rank-capacity-factor 2"
SHORT = "--eval-interval 4 --train-iters 10 --device cuda --bf16 --deterministic-mode"
CUT = "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather"


@pytest.fixture
def deterministic(monkeypatch):
    """Use deterministic algorithms, so that bits can be compared."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model", "granularity", "documents"),
    [
        (MODEL, None, False),
        (WITHOUT_DROPOUT, "selective", True),
        (WITHOUT_DROPOUT, "full", False),
        (HYBRID, None, False),
        (HYBRID, "full", False),
        (EXPERTS, None, False),
        (EXPERTS, "full", False),
    ],
    ids=[
        "dropout",
        "documents",
        "recomputed",
        "hybrid",
        "recomputed hybrid",
        "experts",
        "recomputed experts",
    ],
)
def test_graph_replays_equal_eager_steps_bitwise(
    device, deterministic, dtype, model, granularity, documents
):
    runs = []
    for recorder in (None, CudaRecorder(device, "graphs")):
        step = build_step(
            ProcessGroupCollection.single(),
            DataParallelConfig(),
            graph=recorder,
            granularity=granularity,
            model=model,
            dtype=dtype,
            device=device,
        )
        runs.append(run_steps(step, documents=documents))
    eager, recorded = runs
    assert step.forward_backward.replays == len(REPLAYED)
    assert step.forward_backward.eager_steps == STEPS - len(REPLAYED)
    assert recorded.losses == eager.losses
    assert recorded.launched == eager.launched
    for key, weight in eager.weights.items():
        assert torch.equal(recorded.weights[key], weight), key


def test_graph_replay_allocates_nothing_and_capture_runs_nothing(device):
    step = build_step(
        ProcessGroupCollection.single(),
        DataParallelConfig(),
        graph=CudaRecorder(device, "graphs"),
        device=device,
    )
    run = step.forward_backward
    for i in range(WARMUP):
        step(step_batches(0, i, device=device), lr=1e-3, weight_decay=0.0)
    batches = step_batches(0, 10, device=device)
    factors = step.loss_factors(batches)
    slots = {n: h.main_grad.fill_(7.0) for n, h in step.model.store.handles.items()}
    run._record(batches, factors)
    torch.cuda.synchronize(device)
    assert all(bool((slot == 7.0).all()) for slot in slots.values())
    loss = run(batches, factors)
    assert not any(bool((slot == 7.0).any()) for slot in slots.values())
    before = torch.cuda.memory_allocated(device)
    repeated_loss = run(batches, factors)
    assert torch.cuda.memory_allocated(device) - before <= 512, "the returned loss is one block"
    assert (run.replays, loss.item()) == (2, repeated_loss.item())


def test_run_with_cuda_graph_flag_equals_plain_run(device, tmp_path, capsys):
    prefix = write_tokens(tmp_path / "tokens")
    for name, graph_flags in (("plain", ""), ("graph", GRAPH)):
        save = f"--save {tmp_path / name} --save-interval 5"
        assert run_in_process(flags(prefix, f"{SHORT} {save} {graph_flags}")) == 0
    assert "in one CUDA graph after 3 eager steps" in capsys.readouterr().err
    for kind in ("train", "validation"):
        losses_by_run = [
            losses(tmp_path / name / "metrics.jsonl", kind) for name in ("plain", "graph")
        ]
        assert losses_by_run[0] == losses_by_run[1]


@two_gpus
@pytest.mark.parametrize("options", [CUT, "--data-parallel-sharding-strategy optim", ""])
def test_graphs_of_two_ranks_match_eager_losses(tmp_path, options):
    prefix = write_tokens(tmp_path / "tokens")
    for name, graph in (("plain", ""), ("graph", GRAPH)):
        words = f"{SHORT} {options} {graph} --metrics-file {tmp_path / name}"
        run_on(2, flags(prefix, words))
    assert losses(tmp_path / "plain") == losses(tmp_path / "graph")


@two_gpus
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_graphs_of_two_ranks_with_expert_capacity_match_eager(tmp_path, dispatcher):
    prefix = write_tokens(tmp_path / "tokens")
    experts = f"--num-experts 4 --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 {CAPACITY}"
    for name, graph in (("plain", ""), ("graph", GRAPH)):
        options = f"--moe-token-dispatcher-type {dispatcher} --metrics-file {tmp_path / name}"
        run_on(2, flags(prefix, f"{SHORT} {experts} {options} {graph}"))
    assert losses(tmp_path / "plain") == losses(tmp_path / "graph")


def with_early_gather(rank: int, world: int, port: int, argv: list[str]) -> NoReturn:
    """Run a rank whose first gather starts at the end of the optimizer step, without the checks."""
    with (
        mock.patch.object(core_configs, "early_gather", return_value=(True, None)),
        mock.patch.object(data_parallel, "unrecordable", return_value=None),
        mock.patch.object(data_parallel.StepRecording, "prepare", prepare_too_early),
    ):
        rank_process(rank, world, port, argv)


@two_gpus
def test_gather_started_before_the_step_breaks_capture(tmp_path):
    argv = flags(write_tokens(tmp_path / "tokens"), f"{SHORT} {CUT} {GRAPH}")
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start_ranks(with_early_gather, 2, server.port, argv, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=200.0)
        text = "\n".join(ranks.log(rank) for rank in range(2))
    assert all(outcome.exit_code != 0 for outcome in outcomes), text
    assert "captur" in text.lower(), text
