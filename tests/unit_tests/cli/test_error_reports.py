# SPDX-License-Identifier: Apache-2.0
"""Which rank prints an error, and no rank ends before the error is printed."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megatron.cli import error_reports
from megatron.cli.error_reports import Claims, ErrorReports

TEXT = "error: --lr is -1"


def reports_of_rank(
    rank: int, store: dist.Store | None = None, *, world_size: int = 1
) -> ErrorReports:
    reports = ErrorReports({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    if store is not None:
        reports.share(store, world_size=world_size)
    return reports


def test_silent_rank_ends_after_the_text_is_printed():
    """A launcher terminates the printing rank as soon as the silent rank has ended."""
    store, printing, may_end = dist.HashStore(), threading.Event(), threading.Event()
    printed: list[bool] = []

    def run_rank(rank: int) -> None:
        with reports_of_rank(rank, store).report(TEXT) as prints:
            printed.append(prints)
            if prints:
                printing.set()
                may_end.wait()

    printing_rank, silent_rank = (
        threading.Thread(target=run_rank, args=(rank,)) for rank in (0, 1)
    )
    printing_rank.start()
    printing.wait()
    silent_rank.start()
    silent_rank.join(timeout=0.2)
    waits = silent_rank.is_alive()
    may_end.set()
    assert waits
    silent_rank.join()
    printing_rank.join()
    assert printed == [True, False]


def test_each_distinct_error_is_printed_by_one_rank():
    store = dist.HashStore()
    texts: list[tuple[int, str]] = []

    def run_rank(rank: int) -> None:
        text = f"error: {rank // 2 * 100} bytes"
        with reports_of_rank(rank, store, world_size=4).report(text) as prints:
            if prints:
                texts.append((rank, text))

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in (3, 2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text_by_rank = dict(texts)
    assert sorted(text for _, text in texts) == ["error: 0 bytes", "error: 100 bytes"]
    assert text_by_rank[0] == "error: 0 bytes", (
        "rank 0 prints an error that it shares with another rank"
    )


def test_rank_waits_for_the_errors_of_other_ranks(monkeypatch):
    monkeypatch.setattr(error_reports, "OTHERS_SECONDS", 60.0)
    store = dist.HashStore()

    def run_rank_0() -> None:
        with reports_of_rank(0, store, world_size=2).report("error: of rank 0"):
            pass

    rank_0 = threading.Thread(target=run_rank_0, daemon=True)
    rank_0.start()
    rank_0.join(timeout=0.2)
    assert rank_0.is_alive()
    Claims(store).wait_for_others(2)
    rank_0.join()


@pytest.mark.parametrize(
    ("environment", "prints", "waits"),
    [
        ({}, True, False),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, True, True),
        ({"RANK": "9", "LOCAL_RANK": "1"}, False, True),
        ({"RANK": "x", "LOCAL_RANK": "1"}, True, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, True, False),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, False, True),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "1"}, True, False),
    ],
)
def test_local_rank_0_prints_first_without_a_store(monkeypatch, environment, prints, waits):
    waited: list[float] = []
    monkeypatch.setattr(error_reports.time, "sleep", waited.append)
    with ErrorReports(environment).report(TEXT) as is_printed:
        assert is_printed is prints
    assert bool(waited) is waits


def test_rank_that_never_joined_prints_its_own_error(monkeypatch):
    monkeypatch.setattr(error_reports, "PATIENCE_SECONDS", 0.0)
    reports = reports_of_rank(3)
    reports.join()
    with reports.report(TEXT) as prints:
        assert prints


def test_every_rank_prints_after_the_store_is_lost():
    class LostStore:
        def __getattr__(self, name: str):
            raise dist.DistNetworkError("gone")

    for rank in range(2):
        with reports_of_rank(rank, LostStore(), world_size=2).report(TEXT) as prints:
            assert prints
