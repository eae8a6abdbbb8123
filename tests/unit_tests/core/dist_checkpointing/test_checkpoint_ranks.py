# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on a save: coverage, errors that reach every rank, ranks that die."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import (
    CheckpointError,
    Solo,
    StoreCoordinator,
    TensorChunk,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing import coordinator as coordinator_module
from megatron.core.dist_checkpointing import save as save_module
from megatron.core.dist_checkpointing import save_plan as save_plan_module
from megatron.core.untrusted_files import open_to_write
from tests.support.ranks import start_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import full_chunks, on_threads, raise_errors


def w_chunk(
    rank: int, offsets: tuple[int, ...], tensor: torch.Tensor, *replicas: int
) -> TensorChunk:
    """Return a chunk of `w`, a tensor of shape [4, 3]."""
    return TensorChunk(
        name="w", shape=(4, 3), offsets=offsets, tensor=tensor, replica_ranks=replicas or (rank,)
    )


def save_on_ranks(root: Path, chunks_by_rank: list[list[TensorChunk]]) -> list:
    return on_threads(
        len(chunks_by_rank),
        lambda rank, c: save_checkpoint(root, 1, chunks_by_rank[rank], {}, coordinator=c),
    )


def common_error(errors: list, root: Path) -> str:
    """Return the message that every rank raised; check that no folder is left."""
    assert all(type(error) is CheckpointError for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "\n" not in str(errors[0])
    assert not list(root.glob("iter_*"))
    return str(errors[0])


ROW = torch.ones(1, 3)


def rows(rank: int, start: int, count: int, *replicas: int) -> TensorChunk:
    return w_chunk(rank, (start, 0), ROW.expand(count, 3), *replicas)


@pytest.mark.parametrize(
    ("chunks_by_rank", "text"),
    [
        # a gap, an element twice, a replica that was not declared
        ([[rows(0, 0, 1)], [rows(1, 2, 1)]], "declare only 6"),
        ([[rows(0, 0, 3)], [rows(1, 2, 2)]], "twice"),
        ([[rows(0, 0, 4)], [rows(1, 0, 4)]], "twice"),
        # as many elements as the tensor has, but one row twice and one missing
        ([[rows(0, 0, 2)], [rows(1, 1, 2)]], "twice"),
        # named replica ranks that declare no chunk or another chunk, or that do not exist
        ([[], [rows(1, 0, 4, 0, 1)]], "w among them, .* rank 0 declares none"),
        ([[rows(0, 0, 4)], [rows(1, 0, 1, 0, 1)]], "declares none"),
        ([[rows(0, 0, 1, 0, 1)], [rows(1, 1, 1, 0, 1)]], "1 different chunks"),
        ([[rows(0, 0, 4, 0, 7)], []], "rank 7 declares none"),
        ([[rows(0, 0, 4, 1)], []], "does not contain rank 0"),
        ([[rows(0, 0, 1), rows(0, 0, 1)], []], "twice"),
        (
            [[rows(0, 0, 2)], [w_chunk(1, (2, 0), ROW.expand(2, 3).double())]],
            "must agree",
        ),
        ([[w_chunk(0, (0, 0), ROW.expand(4, 3).cfloat())], []], r"dtype torch.complex64"),
    ],
)
def test_missing_or_duplicate_chunks_are_refused_before_writing(tmp_path, chunks_by_rank, text):
    assert re.search(text, common_error(save_on_ranks(tmp_path, chunks_by_rank), tmp_path))


@pytest.mark.parametrize("failing", [(2,), (0,), (1, 2)])
def test_write_error_reaches_every_rank_and_leaves_no_files(tmp_path, monkeypatch, failing):
    def full(path, mode, **options):
        if int(path.stem[-5:]) in failing:
            raise OSError(28, os.strerror(28), str(path))
        return open_to_write(path, mode, **options)

    monkeypatch.setattr(save_plan_module, "open_to_write", full)
    chunks_by_rank = [[w_chunk(r, (r, 0), ROW if r < 2 else ROW.expand(2, 3))] for r in range(3)]
    text = common_error(save_on_ranks(tmp_path, chunks_by_rank), tmp_path)
    assert "No space left on device" in text
    assert [rank for rank in range(3) if f"rank {rank}: " in text] == list(failing)
    monkeypatch.undo()
    raise_errors(save_on_ranks(tmp_path, chunks_by_rank))  # the same step can be saved afterwards
    verify_checkpoint(tmp_path / "iter_0000001")


def test_failed_save_can_be_repeated_with_same_coordinators(tmp_path):
    """The second attempt must not read the answers of the first."""
    (tmp_path / "iter_0000001").mkdir()
    chunks_by_rank = [[rows(r, 2 * r, 2)] for r in range(2)]

    def save_twice(rank, coordinator):
        with pytest.raises(CheckpointError, match="exists already"):
            save_checkpoint(tmp_path, 1, chunks_by_rank[rank], {}, coordinator=coordinator)
        if rank == 0:
            (tmp_path / "iter_0000001").rmdir()
            time.sleep(0.1)  # rank 1 polls before rank 0 has an answer
        return save_checkpoint(tmp_path, 1, chunks_by_rank[rank], {}, coordinator=coordinator)

    raise_errors(on_threads(2, save_twice))
    verify_checkpoint(tmp_path / "iter_0000001")


def test_an_error_while_loading_reaches_every_rank(tmp_path):
    chunks_by_rank = [[rows(r, 2 * r, 2)] for r in range(2)]
    raise_errors(save_on_ranks(tmp_path, chunks_by_rank))
    folder = tmp_path / "iter_0000001"
    with (folder / "shard-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    targets = [[w_chunk(r, (2 * r, 0), torch.zeros(2, 3))] for r in range(2)]
    errors = on_threads(2, lambda rank, c: load_checkpoint(folder, targets[rank], coordinator=c))
    assert all("rank 1: " in str(error) and "shard-00001" in str(error) for error in errors)


def test_ranks_seeing_different_checkpoints_are_reported(tmp_path):
    folders = [
        save_checkpoint(tmp_path / str(r), 1, full_chunks({"w": ROW + r}), {}, coordinator=Solo())
        for r in range(2)
    ]
    errors = on_threads(2, lambda r, c: load_checkpoint(folders[r], [], coordinator=c))
    assert all("same file system" in str(error) for error in errors)


def test_long_messages_are_chunked_and_only_last_answer_is_kept(monkeypatch):
    monkeypatch.setattr(coordinator_module, "MAX_VALUE_BYTES", 100)
    store = dist.HashStore()
    long = "x" * 205

    def talk(rank):
        coordinator = StoreCoordinator(store, rank, 3, timeout_seconds=20)
        answers = []
        for turn in range(3):
            coordinator.begin("talk")
            answers.append(coordinator.agree("a", lambda: f"{rank}{long}", lambda m: m))
            answers.append(coordinator.agree("b", lambda t=turn: t, lambda m: long[: sum(m)]))
        return answers

    for answers in raise_errors(on_threads(3, lambda rank, _: talk(rank))):
        assert answers[::2] == [[f"{rank}{long}" for rank in range(3)]] * 3
        assert answers[1::2] == ["", "xxx", "xxxxxx"]
    assert store.num_keys() == 1


@pytest.mark.parametrize(("rank", "awaited"), [(0, 1), (1, 0)])
def test_dead_rank_is_not_waited_for(monkeypatch, rank, awaited):
    monkeypatch.setattr(coordinator_module, "MIN_WAIT_SECONDS", 0.05)
    missing_ranks = []

    def missed(missing_rank):
        missing_ranks.append(missing_rank)
        if len(missing_ranks) == 3:
            raise ProcessLookupError(f"rank {missing_rank} is dead")

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = StoreCoordinator(server, rank, 2, timeout_seconds=60, on_missing_rank=missed)
    coordinator.begin("talk")
    with pytest.raises(ProcessLookupError, match=f"rank {awaited} is dead"):
        coordinator.agree("a", lambda: 1, lambda m: m)
    assert missing_ranks == [awaited] * 3


def die_or_save(rank: int, world: int, root: str, port: int, victim: int, stage: str) -> str:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    coordinator = StoreCoordinator(store, rank, world, timeout_seconds=1.0)
    store.set(f"ready{rank}", "")
    store.wait([f"ready{r}" for r in range(world)])  # keep slow starts out of the time limit
    begun = time.monotonic()

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        owner = save_module if stage == "plan_shard" else save_plan_module.SaveSteps
        setattr(owner, stage, die)
    try:
        chunks = full_chunks({f"w{rank}": torch.ones(5)}, (rank,))
        save_checkpoint(root, 2, chunks, {}, coordinator=coordinator)
    except CheckpointError as error:
        return f"{time.monotonic() - begun:.1f} {error}"
    return "saved"


@pytest.mark.parametrize(
    ("victim", "stage"), [(1, "plan_shard"), (2, "write"), (0, "write"), (0, "commit")]
)
def test_dead_rank_raises_on_the_others_within_the_timeout(tmp_path, victim, stage):
    before = save_checkpoint(tmp_path, 1, full_chunks({"w": ROW}), {}, coordinator=Solo())
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (str(tmp_path), server.port, victim, stage)
    with start_ranks(die_or_save, 3, *arguments, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=20)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        seconds, text = outcomes[rank].value.split(" ", 1)
        assert float(seconds) < 8
        # every rank misses a dead rank 0; rank 0 names any other dead rank
        assert f"rank {victim}" in text
    assert list_checkpoints(tmp_path) == [before]
    assert latest_checkpoint(tmp_path) == before
    if victim:
        assert not list(tmp_path.glob("*.tmp-*"))


def serve_a_store(rank: int, world: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"port {server.port} is open", flush=True)
    time.sleep(60)


def test_lost_store_server_is_a_checkpoint_error():
    with start_ranks(serve_a_store, 1, init=False) as server:
        server.wait_for_line(0, "open")
        port = int(server.log(0).split()[1])
        coordinator = StoreCoordinator(dist.TCPStore("127.0.0.1", port), 1, 2, timeout_seconds=20.0)
        coordinator.begin("saving")
        threading.Timer(0.2, server.kill, (0,)).start()
        begun = time.monotonic()
        with pytest.raises(CheckpointError, match=r"saving: rank 1 lost the store .* 'stage'"):
            coordinator.agree("stage", lambda: None, lambda m: None)
        assert time.monotonic() - begun < 10
