# SPDX-License-Identifier: Apache-2.0
"""Which samples a run sees, whatever happens: resumed, on other layouts, on nodes without a shared
disk. One test for each row of the table of faults."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.cli.flags import parse_command_line
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.training import session
from megatron.training.config import Config
from megatron.training.config.resolve import ResolvedRun, resolve
from megatron.training.data.data_sets import build_data_sets, read_ahead, training_batches
from megatron.training.data.vocabulary import Vocabulary
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import (
    VOCABULARY,
    digests,
    flags,
    losses,
    rank_process,
    run_here,
    run_on,
    timeless,
    write_tokens,
)
from tests.support.older_checkpoints import leave_out
from tests.support.ranks import start_ranks

PLAIN = "--attention-dropout 0 --hidden-dropout 0 --eval-interval 0"


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def run_of(argv: list[str], world: int = 1) -> ResolvedRun:
    """Return the run that some arguments describe."""
    return resolve(parse_command_line(Config, argv, prog="p", description="d").config, world)


def test_changed_data_set_is_refused_unless_allowed(prefix, tmp_path, capsys):
    other = write_tokens(tmp_path / "other", seed=6)
    path = f"--data-path 1 {prefix} 3 {other}"
    common = f"{PLAIN} --train-iters 3 --load {tmp_path}/run"
    saved = flags(prefix, f"{common} {path} --save {tmp_path}/run --exit-interval 2")
    assert run_here(saved) == 0

    def resumed(more: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run_here(flags(prefix, f"{common} {more}"))
        return code, "".join(capsys.readouterr())

    code, said = resumed(f"--data-path 2 {prefix} 3 {other}")
    assert code == 2
    assert "weights: [1.0, 3.0] in the checkpoint, [2.0, 3.0] now" in said
    assert "--allow-data-change" in said
    write_tokens(other, seed=7)
    code, said = resumed(path)
    assert code == 2
    assert f"data file 2, {other}, has other content" in said
    code, said = resumed(f"{path} --allow-data-change")
    assert code == 0
    assert "continuing with the new data, as --allow-data-change" in said
    assert "iteration        3/" in said


@pytest.mark.parametrize("dataloader", ["single", "cyclic"])
@pytest.mark.covers("resumed to the same bits", runs="loads")
def test_a_resumed_run_goes_on_with_the_next_sample(prefix, tmp_path, monkeypatch, dataloader):
    """In the middle of an epoch, where the next begins within a batch, and at the last sample."""
    seen: list[list[list[int]]] = []

    def recorded(batch, device, **more):
        seen.append(batch.tokens.tolist())
        return kept(batch, device, **more)

    kept = session.microbatch
    monkeypatch.setattr(session, "microbatch", recorded)
    write_tokens(prefix, documents=20)
    common = f"{PLAIN} --dataloader-type {dataloader} --global-batch-size 4"
    assert run_here(flags(prefix, f"{common} --save {tmp_path}/run --save-interval 1")) == 0
    whole, per_step = seen.copy(), 2
    assert len(whole) == 12 * per_step
    data = build_data_sets(
        run_of(flags(prefix, f"{common} --dataloader-type cyclic")),
        Vocabulary(size=VOCABULARY, eod=None, tokenizer={}),
    )
    border, inside = divmod(len(data.train), 4)  # an epoch is not a whole number of steps
    assert 3 < border < 10
    assert inside
    for iteration in (2, border, border + 1, 11, 12):
        seen.clear()
        assert run_here(flags(prefix, f"{common} --load {tmp_path}/run/iter_{iteration:07}")) == 0
        assert seen == whole[iteration * per_step :], iteration


@pytest.mark.covers("resumed to the same bits", runs="loads")
def test_another_length_keeps_the_order(prefix, tmp_path, monkeypatch, capsys):
    """A run of 12 steps of 8 samples, resumed at 4 for 24 steps, and that one at 9; with steps of
    another size, on two ranks, and from a checkpoint of before lengths were saved."""
    seen: list[list[int]] = []

    def recorded(batch, device, **more):
        seen.extend(batch.tokens.tolist())
        return kept(batch, device, **more)

    kept = session.microbatch
    monkeypatch.setattr(session, "microbatch", recorded)
    common = f"{PLAIN} --lr-decay-iters 12"

    def rows(folder: str, more: str) -> list[list[int]]:
        seen.clear()
        assert run_here(flags(prefix, f"{common} --save {tmp_path / folder} {more}")) == 0
        return seen.copy()

    whole = rows("begun", "--train-iters 12 --save-interval 4")
    start = f"--load {tmp_path}/begun/iter_0000004"
    longer = rows("longer", f"--train-iters 24 --save-interval 9 {start}")
    assert longer[: 8 * 8] == whole[4 * 8 :]
    assert len({tuple(row) for row in longer[8 * 8 :]}) > 40
    assert "samples keep the order of 96" in capsys.readouterr().out
    middle = f"--load {tmp_path}/longer/iter_0000009"
    assert rows("again", f"--train-iters 24 {middle}") == longer[5 * 8 :]
    assert digests(tmp_path / "again/iter_0000024") == digests(tmp_path / "longer/iter_0000024")
    smaller = rows("smaller", f"--train-iters 20 --global-batch-size 4 {middle}")
    assert smaller == longer[5 * 8 :][: 11 * 4]
    assert (
        rows("reordered", f"--train-iters 24 --reorder-samples {start} --exit-interval 5")
        != (whole[4 * 8 : 5 * 8])
    )
    run_on(2, flags(prefix, f"{common} --train-iters 14 {start} --save {tmp_path}/two"))
    expected = losses(tmp_path / "longer/metrics.jsonl")
    found = losses(tmp_path / "two/metrics.jsonl")
    assert found == pytest.approx({i: expected[i] for i in range(5, 15)}, rel=1e-4)
    leave_out(tmp_path / "begun/iter_0000004", "progress", "order_lengths")
    assert rows("shorter", f"--train-iters 6 {start}") == whole[4 * 8 : 6 * 8]


def test_data_draw_from_no_random_stream(prefix, tmp_path):
    """Order is a function of seed and number, so making loaders moves no generator."""

    def states() -> tuple[bytes, str, str]:
        numpy_state = np.random.get_state()
        return (
            torch.get_rng_state().numpy().tobytes(),
            str((numpy_state[1].tolist(), numpy_state[2:])),
            str(random.getstate()),
        )

    before = states()
    for more in ("--dataloader-type cyclic", "--mock-data", f"--data-path 1 {prefix} 1 {prefix}"):
        argv = flags(prefix, f"{more} --data-cache-path {tmp_path}/cache --num-workers 2")
        if "--mock-data" in more:
            at = argv.index("--data-path")
            argv = argv[:at] + argv[at + 2 :]
        run = run_of(argv)
        data = build_data_sets(run, Vocabulary(size=VOCABULARY, eod=None, tokenizer={}))
        lanes = SimpleNamespace(rank=0, size=1)
        batches = read_ahead(training_batches(data, run, dp_group=lanes, consumed_samples=6), run)
        for _ in range(5):
            next(batches)
        batches.close()
    assert states() == before


def test_the_first_log_line_after_a_resume_counts_nothing_twice(prefix, tmp_path):
    """Stopped within a window of four steps; the split for tests is evaluated once, at the end."""
    common = "--train-iters 8 --log-interval 4 --eval-interval 8 --eval-iters 1 --split 80,10,10"
    assert run_here(flags(prefix, f"{common} --save {tmp_path}/whole")) == 0
    cut = f"{common} --save {tmp_path}/cut --load {tmp_path}/cut"
    assert run_here(flags(prefix, f"{cut} --exit-interval 6")) == 0
    assert [e["iteration"] for e in read_metrics(tmp_path / "cut/metrics.jsonl")][-1] == 6
    assert run_here(flags(prefix, cut)) == 0
    whole, resumed = (timeless(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert resumed == whole
    assert [e["iteration"] for e in whole if e["kind"] == "train"] == [4, 8]
    assert [e["iteration"] for e in whole if e["kind"] == "test"] == [8]


def test_data_order_is_independent_of_workers_and_dp_size(prefix, tmp_path, capsys):
    """Six ways of reading give one order; two lanes that read ahead give the losses of one."""
    found = {}
    for size in (1, 2, 4):
        for workers in (0, 4):
            run = run_of(
                flags(prefix, f"{PLAIN} --num-workers {workers} --micro-batch-size 1"), size
            )
            data = build_data_sets(run, Vocabulary(size=VOCABULARY, eod=None, tokenizer={}))
            lanes = [
                read_ahead(
                    training_batches(
                        data,
                        run,
                        dp_group=SimpleNamespace(rank=rank, size=size),
                        consumed_samples=8,
                    ),
                    run,
                )
                for rank in range(size)
            ]
            order = []
            for _ in range(24 // size):
                for lane in lanes:
                    batch = next(lane)
                    order.append((batch.sample_ids.tolist(), batch.tokens.tolist()))
            for lane in lanes:
                if workers:
                    lane.close()
            found[size, workers] = order
    assert all(order == found[1, 0] for order in found.values())
    assert [ids for ids, _ in found[1, 0]] == [[i] for i in range(8, 32)]

    common = f"{PLAIN} --train-iters 3"
    run_on(1, flags(prefix, f"{common} --num-workers 0 --metrics-file {tmp_path}/1.jsonl"))
    run_on(2, flags(prefix, f"{common} --num-workers 4 --metrics-file {tmp_path}/2.jsonl"))
    assert losses(tmp_path / "2.jsonl") == pytest.approx(losses(tmp_path / "1.jsonl"), rel=1e-5)

    with IndexedDatasetWriter(tmp_path / "bad", np.dtype("<u2")) as writer:
        writer.add_document(np.full(400, VOCABULARY + 9))
    capsys.readouterr()
    assert run_here(flags(tmp_path / "bad", f"{common} --split 1 --num-workers 4")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert f"token id {VOCABULARY + 9} at position" in said[0]


def _build(rank: int, world: int, folder: str, victim: int | None) -> int:
    """Ask for one entry with all others; return the sum of what came back."""

    def build() -> dict[str, np.ndarray]:
        with Path(folder, "builds").open("a") as log:
            print(rank, file=log, flush=True)
        time.sleep(0.3)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"order": np.arange(10000)}

    if victim is not None and rank != victim:
        while not Path(folder, "builds").exists():  # let the one that dies come first
            time.sleep(0.005)
    cache = IndexCache(Path(folder, "cache"))
    return int(cache.load_or_build("k", {"a": 1}, build, names=("order",))["order"].sum())


@pytest.mark.parametrize("victim", [None, 2])
def test_processes_of_a_node_build_an_index_once(tmp_path, victim):
    """Also when the one that builds is killed: its lock is free at once, nobody reads a part."""
    with start_ranks(_build, 4, str(tmp_path), victim, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=30)
    builders = (tmp_path / "builds").read_text().split()
    if victim is None:
        assert len(builders) == 1
    else:
        assert len(builders) == 2
        assert builders[0] == str(victim)
        assert outcomes[victim].exit_code == -signal.SIGKILL
    alive = [o for o in outcomes if o.rank != victim]
    assert [o.value for o in alive] == [sum(range(10000))] * len(alive)


def test_run_rebuilds_damaged_cache_or_runs_without_it(prefix, tmp_path, capsys):
    cache = tmp_path / "cache"
    found = []
    for number, damage in enumerate(("none", "none", "half", "stale", "read-only")):
        if damage == "half":
            for path in cache.glob("*.npy"):
                path.write_bytes(path.read_bytes()[:-9])
        elif damage == "stale":
            for path in cache.glob("*.json"):
                path.write_text('{"description": "of other data", "arrays": {}}')
        elif damage == "read-only":
            cache = tmp_path / "a file" / "cache"
            cache.parent.write_text("no folder can be made here, not even by root")
        metrics = tmp_path / f"{number}.jsonl"
        argv = flags(
            prefix,
            f"{PLAIN} --train-iters 3 --data-cache-path {'CACHE'} --metrics-file {metrics}",
        )
        argv[argv.index("CACHE")] = str(cache)
        assert run_here(argv) == 0
        found.append(losses(metrics))
    assert all(loss == found[0] for loss in found)


def _node(rank: int, world: int, port: int, argvs: list[list[str]]) -> None:
    rank_process(rank, world, port, argvs[rank])


def test_nodes_that_share_no_disk_build_an_index_each(prefix, tmp_path):
    """Two ranks, each with files and a cache folder of its own."""
    argvs = []
    for node in range(2):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        for ending in (".bin", ".idx"):
            (folder / f"tokens{ending}").write_bytes(Path(f"{prefix}{ending}").read_bytes())
        more = f"{PLAIN} --train-iters 3 --data-cache-path {folder}/cache"
        argvs.append(flags(folder / "tokens", f"{more} --metrics-file {folder}/metrics.jsonl"))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start_ranks(_node, 2, server.port, argvs, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=60)
        logs = [ranks.log(rank) for rank in range(2)]
    del server
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    kept = [sorted(p.name for p in (tmp_path / f"node{n}/cache").iterdir()) for n in range(2)]
    assert kept[0] == kept[1]
    assert sum(name.endswith(".npy") for name in kept[0]) == 3
    run_on(1, flags(prefix, f"{PLAIN} --train-iters 3 --metrics-file {tmp_path}/one.jsonl"))
    found = losses(tmp_path / "node1/metrics.jsonl")
    assert found == pytest.approx(losses(tmp_path / "one.jsonl"), rel=1e-5)
