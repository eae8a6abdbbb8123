# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs that are pretended: which tests run, and what reaches the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.functional_tests.small_run import flags
from tests.support import ranks
from tests.support.gpu_tests import GpuTests, gpus_of


@pytest.fixture
def two_gpus() -> Iterator[GpuTests]:
    """Choose tests and start ranks as on a machine with two GPUs."""
    with mock.patch.object(ranks, "gpu_count", return_value=2):
        tests = GpuTests()
        yield tests
        tests.pytest_unconfigure()


class PretendedGpus:
    """What makes the process that unpickles it take GPUs and NCCL for granted, and note the use."""

    def __reduce__(self):
        return _pretend, ()


def _pretend() -> list[object]:
    calls: list[object] = []
    torch.cuda.set_device = lambda device: calls.append(device)  # type: ignore[assignment]
    dist.init_process_group = lambda backend, **options: calls.append(  # type: ignore[assignment]
        (backend, options["device_id"], options["rank"], options["world_size"])
    )
    return calls


def seen(rank: int, world: int, calls: list[object]) -> tuple[list[object], torch.device]:
    """Return what this rank has called, and where it computes."""
    return calls, ranks.rank_device()


def test_each_rank_has_a_gpu_and_a_group_over_nccl(two_gpus: GpuTests) -> None:
    devices = [torch.device("cuda", rank) for rank in range(2)]
    assert ranks.run_ranks(seen, 2, PretendedGpus()) == [
        ([device, ("nccl", device, rank, 2)], device) for rank, device in enumerate(devices)
    ]
    assert ranks.rank_device() == torch.device("cpu"), "the reference is that of the test's process"


def test_ranks_stay_on_the_cpu_without_the_option() -> None:
    cpu = torch.device("cpu")
    assert ranks.run_ranks(seen, 2, PretendedGpus()) == [
        ([("gloo", None, rank, 2)], cpu) for rank in range(2)
    ]
    assert "--device" not in flags(Path("tokens"))


def test_more_ranks_than_gpus_are_refused(two_gpus: GpuTests) -> None:
    with pytest.raises(ValueError, match=r"4 ranks need 4 GPUs.*sees 2.*gpus\(4\)"):
        ranks.run_ranks(seen, 4, PretendedGpus())


def test_runs_of_the_entry_points_take_gpus_too(two_gpus: GpuTests) -> None:
    words = flags(Path("tokens"), "--train-iters 3")
    assert words[words.index("--device") + 1] == "cuda"


@pytest.mark.parametrize(
    ("count", "least", "line"),
    [(0, 1, "--device cuda: torch sees no GPU"), (1, 2, "--gpus 2: torch sees 1 of them")],
)
def test_a_session_with_too_few_gpus_is_refused(count: int, least: int, line: str) -> None:
    with (
        mock.patch.object(ranks, "gpu_count", return_value=count),
        pytest.raises(pytest.UsageError, match=f"^{line}$"),
    ):
        GpuTests(least)
    assert ranks.DEVICES == ["cpu"]


class Item:
    """A collected test."""

    def __init__(self, name: str, *marks: pytest.Mark, **params: object) -> None:
        self.name, self.marks = name, {mark.name: mark for mark in marks}
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """Return a mark of the test."""
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        """Mark the test."""
        self.marks[mark.name] = mark.mark


def test_tests_say_how_many_gpus_they_need(two_gpus: GpuTests) -> None:
    items = [
        Item("cpu"),
        Item("one", pytest.mark.gpus(1).mark),
        Item("two", pytest.mark.gpus("world").mark, world=2),
        Item("four", pytest.mark.gpus("world").mark, world=4),
    ]
    left_out, config = items[:1], mock.Mock()
    assert [gpus_of(item) for item in items] == [None, 1, 2, 4]  # type: ignore[arg-type]
    two_gpus.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    config.hook.pytest_deselected.assert_called_once_with(items=left_out)
    assert [item.name for item in items] == ["one", "two", "four"]
    skipped = {i.name: i.marks["skip"].kwargs["reason"] for i in items if "skip" in i.marks}
    assert skipped == {"four": "needs 4 GPUs, and torch sees 2"}
