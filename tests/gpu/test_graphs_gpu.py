# SPDX-License-Identifier: Apache-2.0
"""Steps recorded as CUDA graphs: the bits of eager steps, on one GPU and with NCCL on two."""

from __future__ import annotations

from typing import NoReturn
from unittest import mock

import pytest
import torch

from megatron.core.device import CudaRecorder
from megatron.core.distributed import DataParallelConfig, capture
from megatron.core.process_groups import ProcessGroupCollection
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
ROOM = "--moe-expert-rank-capacity-factor 2"
SHORT = "--eval-interval 4 --train-iters 10 --device cuda --bf16 --deterministic-mode"
CUT = "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather"


@pytest.fixture
def one_order(monkeypatch):
    """Sums of gradients in one order: bits can be compared."""
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
def test_replays_are_eager_steps_bit_by_bit(
    device, one_order, dtype, model, granularity, documents
):
    found = []
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
        found.append(run_steps(step, documents=documents))
    eager, recorded = found
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
    first = run(batches, factors)
    assert not any(bool((slot == 7.0).any()) for slot in slots.values())
    before = torch.cuda.memory_allocated(device)
    second = run(batches, factors)
    assert torch.cuda.memory_allocated(device) - before <= 512, "what it returns is one block"
    assert (run.replays, first.item()) == (2, second.item())


def test_a_run_by_flags_is_the_plain_one(device, tmp_path, capsys):
    prefix = write_tokens(tmp_path / "tokens")
    for name, more in (("plain", ""), ("graph", GRAPH)):
        save = f"--save {tmp_path / name} --save-interval 5"
        assert run_in_process(flags(prefix, f"{SHORT} {save} {more}")) == 0
    assert "in one CUDA graph after 3 eager steps" in capsys.readouterr().err
    for kind in ("train", "validation"):
        found = [losses(tmp_path / name / "metrics.jsonl", kind) for name in ("plain", "graph")]
        assert found[0] == found[1]


@two_gpus
@pytest.mark.parametrize("more", [CUT, "--data-parallel-sharding-strategy optim", ""])
def test_two_ranks_record_their_collectives(tmp_path, more):
    prefix = write_tokens(tmp_path / "tokens")
    for name, graph in (("plain", ""), ("graph", GRAPH)):
        words = f"{SHORT} {more} {graph} --metrics-file {tmp_path / name}"
        run_on(2, flags(prefix, words))
    assert losses(tmp_path / "plain") == losses(tmp_path / "graph")


@two_gpus
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_two_ranks_record_experts_within_a_capacity(tmp_path, dispatcher):
    prefix = write_tokens(tmp_path / "tokens")
    experts = f"--num-experts 4 --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 {ROOM}"
    for name, graph in (("plain", ""), ("graph", GRAPH)):
        more = f"--moe-token-dispatcher-type {dispatcher} --metrics-file {tmp_path / name}"
        run_on(2, flags(prefix, f"{SHORT} {experts} {more} {graph}"))
    assert losses(tmp_path / "plain") == losses(tmp_path / "graph")


def with_early_gather(rank: int, world: int, port: int, argv: list[str]) -> NoReturn:
    """Be a rank whose first gather starts at the end of the optimizer step, past all refusals."""
    with (
        mock.patch.object(core_configs, "early_gather", return_value=(True, None)),
        mock.patch.object(capture, "unrecordable", return_value=None),
        mock.patch.object(capture.StepRecording, "prepare", prepare_too_early),
    ):
        rank_process(rank, world, port, argv)


@two_gpus
def test_a_gather_that_starts_before_the_step_cannot_be_recorded(tmp_path):
    argv = flags(write_tokens(tmp_path / "tokens"), f"{SHORT} {CUT} {GRAPH}")
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start_ranks(with_early_gather, 2, server.port, argv, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=200.0)
        text = "\n".join(ranks.log(rank) for rank in range(2))
    assert all(outcome.exit_code != 0 for outcome in outcomes), text
    assert "captur" in text.lower(), text
