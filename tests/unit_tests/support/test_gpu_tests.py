# SPDX-License-Identifier: Apache-2.0
"""Ranks on simulated GPUs: which tests run, and which devices and groups the ranks use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.functional_tests.small_run import flags
from tests.support import ranks
from tests.support.gpu_tests import GpuTests


@pytest.fixture
def two_gpus() -> Iterator[GpuTests]:
    """Choose tests and start ranks as on a machine with two GPUs."""
    with mock.patch.object(ranks, "gpu_count", return_value=2):
        tests = GpuTests()
        yield tests
        tests.pytest_unconfigure()


class SimulatedGpus:
    """Unpickling this object replaces GPU selection and NCCL with functions that record calls."""

    def __reduce__(self):
        return _simulate_gpus, ()


def _simulate_gpus() -> list[object]:
    calls: list[object] = []
    torch.cuda.set_device = lambda device: calls.append(device)  # type: ignore[assignment]
    dist.init_process_group = lambda backend, **options: calls.append(  # type: ignore[assignment]
        (backend, options["device_id"], options["rank"], options["world_size"])
    )
    return calls


def calls_of_rank(rank: int, world: int, calls: list[object]) -> tuple[list[object], torch.device]:
    """Return the recorded calls and the device of this rank."""
    return calls, ranks.rank_device()


def test_each_rank_has_a_gpu_and_an_nccl_group(two_gpus: GpuTests) -> None:
    devices = [torch.device("cuda", rank) for rank in range(2)]
    assert ranks.run_ranks(calls_of_rank, 2, SimulatedGpus()) == [
        ([device, ("nccl", device, rank, 2)], device) for rank, device in enumerate(devices)
    ]
    assert ranks.rank_device() == torch.device("cpu"), "the test's process computes the reference"


def test_ranks_stay_on_the_cpu_without_the_option() -> None:
    cpu = torch.device("cpu")
    assert ranks.run_ranks(calls_of_rank, 2, SimulatedGpus()) == [
        ([("gloo", None, rank, 2)], cpu) for rank in range(2)
    ]
    assert "--device" not in flags(Path("tokens"))


def test_more_ranks_than_gpus_are_refused(two_gpus: GpuTests) -> None:
    with pytest.raises(ValueError, match=r"4 ranks need 4 GPUs.*sees 2.*gpus\(4\)"):
        ranks.run_ranks(calls_of_rank, 4, SimulatedGpus())


@pytest.mark.parametrize(
    ("count", "required", "line"),
    [(0, 1, "--device cuda: torch sees no GPU"), (1, 2, "--gpus 2: torch sees 1 of them")],
)
def test_session_with_too_few_gpus_is_refused(count: int, required: int, line: str) -> None:
    with (
        mock.patch.object(ranks, "gpu_count", return_value=count),
        pytest.raises(pytest.UsageError, match=f"^{line}$"),
    ):
        GpuTests(required)
    assert ranks.DEVICES == ["cpu"]
