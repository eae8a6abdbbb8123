# SPDX-License-Identifier: Apache-2.0
"""The sample order of runs that are resumed, use other layouts, or have no shared disk."""

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
from megatron.core.datasets import IndexedDatasetWriter
from megatron.core.datasets.index_cache import IndexCache
from megatron.training import train_steps
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
    run_in_process,
    run_on,
    timeless,
    write_tokens,
)
from tests.support.edited_manifests import leave_out
from tests.support.ranks import start_ranks

PLAIN = "--attention-dropout 0 --hidden-dropout 0 --eval-interval 0"


def run_of(argv: list[str], world: int = 1) -> ResolvedRun:
    """Return the run that `argv` describes."""
    return resolve(parse_command_line(Config, argv, prog="p", description="d").config, world)


def test_changed_data_set_is_refused_unless_allowed(prefix, tmp_path, capsys):
    second_prefix = write_tokens(tmp_path / "other", seed=6)
    path = f"--data-path 1 {prefix} 3 {second_prefix}"
    common = f"{PLAIN} --train-iters 3 --load {tmp_path}/run"
    saved = flags(prefix, f"{common} {path} --save {tmp_path}/run --exit-interval 2")
    assert run_in_process(saved) == 0

    def resumed(options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run_in_process(flags(prefix, f"{common} {options}"))
        return code, "".join(capsys.readouterr())

    code, output = resumed(f"--data-path 2 {prefix} 3 {second_prefix}")
    assert code == 2
    assert "weights: [1.0, 3.0] in the checkpoint, [2.0, 3.0] now" in output
    assert "--allow-data-change" in output
    write_tokens(second_prefix, seed=7)
    code, output = resumed(path)
    assert code == 2
    assert f"data file 2, {second_prefix}, has other content" in output
    code, output = resumed(f"{path} --allow-data-change")
    assert code == 0
    assert "continuing with the new data, as --allow-data-change" in output
    assert "iteration        3/" in output


@pytest.mark.parametrize("dataloader", ["single", "cyclic"])
@pytest.mark.covers("bit-identical resume")
def test_resumed_run_continues_with_the_next_sample(prefix, tmp_path, monkeypatch, dataloader):
    """Resume within an epoch, at an epoch boundary within a batch, and at the last sample."""
    microbatches: list[list[list[int]]] = []

    def recorded(batch, device, **kwargs):
        microbatches.append(batch.tokens.tolist())
        return microbatch(batch, device, **kwargs)

    microbatch = train_steps.microbatch
    monkeypatch.setattr(train_steps, "microbatch", recorded)
    write_tokens(prefix, documents=20)
    common = f"{PLAIN} --dataloader-type {dataloader} --global-batch-size 4"
    assert run_in_process(flags(prefix, f"{common} --save {tmp_path}/run --save-interval 1")) == 0
    expected, per_step = microbatches.copy(), 2
    assert len(expected) == 12 * per_step
    data_sets = build_data_sets(
        run_of(flags(prefix, f"{common} --dataloader-type cyclic")),
        Vocabulary(size=VOCABULARY, eod=None, tokenizer={}),
    )
    epoch_steps, samples_in_partial_step = divmod(
        len(data_sets.train), 4
    )  # an epoch is not a whole number of steps
    assert 3 < epoch_steps < 10
    assert samples_in_partial_step
    for iteration in (2, epoch_steps, epoch_steps + 1, 11, 12):
        microbatches.clear()
        assert (
            run_in_process(flags(prefix, f"{common} --load {tmp_path}/run/iter_{iteration:07}"))
            == 0
        )
        assert microbatches == expected[iteration * per_step :], iteration


@pytest.mark.slow
@pytest.mark.covers("bit-identical resume")
def test_resuming_with_other_length_keeps_sample_order(prefix, tmp_path, monkeypatch, capsys):
    """A run of 12 steps of 8 samples is resumed at step 4 for 24 steps, and again at step 9, with
    another batch size, on two ranks, and from a checkpoint without saved lengths."""
    samples: list[list[int]] = []

    def recorded(batch, device, **options):
        samples.extend(batch.tokens.tolist())
        return microbatch(batch, device, **options)

    microbatch = train_steps.microbatch
    monkeypatch.setattr(train_steps, "microbatch", recorded)
    common = f"{PLAIN} --lr-decay-iters 12"

    def rows(folder: str, options: str) -> list[list[int]]:
        samples.clear()
        assert run_in_process(flags(prefix, f"{common} --save {tmp_path / folder} {options}")) == 0
        return samples.copy()

    original_samples = rows("begun", "--train-iters 12 --save-interval 4")
    start = f"--load {tmp_path}/begun/iter_0000004"
    longer = rows("longer", f"--train-iters 24 --save-interval 9 {start}")
    assert longer[: 8 * 8] == original_samples[4 * 8 :]
    assert len({tuple(row) for row in longer[8 * 8 :]}) > 40
    assert "samples keep the order of 96" in capsys.readouterr().out
    middle = f"--load {tmp_path}/longer/iter_0000009"
    assert rows("again", f"--train-iters 24 {middle}") == longer[5 * 8 :]
    assert digests(tmp_path / "again/iter_0000024") == digests(tmp_path / "longer/iter_0000024")
    smaller = rows("smaller", f"--train-iters 20 --global-batch-size 4 {middle}")
    assert smaller == longer[5 * 8 :][: 11 * 4]
    assert (
        rows("reordered", f"--train-iters 24 --reorder-samples {start} --exit-interval 5")
        != (original_samples[4 * 8 : 5 * 8])
    )
    run_on(2, flags(prefix, f"{common} --train-iters 14 {start} --save {tmp_path}/two"))
    expected = losses(tmp_path / "longer/metrics.jsonl")
    actual = losses(tmp_path / "two/metrics.jsonl")
    assert actual == pytest.approx({i: expected[i] for i in range(5, 15)}, rel=1e-4)
    leave_out(tmp_path / "begun/iter_0000004", "progress", "order_lengths")
    assert rows("shorter", f"--train-iters 6 {start}") == original_samples[4 * 8 : 6 * 8]


@pytest.mark.slow
def test_data_loaders_leave_global_rng_states_unchanged(prefix, tmp_path):
    """The order is a function of seed and sample number, so loaders draw from no generator."""

    def states() -> tuple[bytes, str, str]:
        numpy_state = np.random.get_state()
        return (
            torch.get_rng_state().numpy().tobytes(),
            str((numpy_state[1].tolist(), numpy_state[2:])),
            str(random.getstate()),
        )

    before = states()
    for options in (
        "--dataloader-type cyclic",
        "--mock-data",
        f"--data-path 1 {prefix} 1 {prefix}",
    ):
        argv = flags(prefix, f"{options} --data-cache-path {tmp_path}/cache --num-workers 2")
        if "--mock-data" in options:
            at = argv.index("--data-path")
            argv = argv[:at] + argv[at + 2 :]
        run = run_of(argv)
        data_sets = build_data_sets(run, Vocabulary(size=VOCABULARY, eod=None, tokenizer={}))
        dp_group = SimpleNamespace(rank=0, size=1)
        batches = read_ahead(
            training_batches(data_sets, run, dp_group=dp_group, consumed_samples=6), run
        )
        for _ in range(5):
            next(batches)
        batches.close()
    assert states() == before


def test_first_log_line_after_resume_double_counts_nothing(prefix, tmp_path):
    """Stop within a log window of four steps; the test split is evaluated once, at the end."""
    common = "--train-iters 8 --log-interval 4 --eval-interval 8 --eval-iters 1 --split 80,10,10"
    assert run_in_process(flags(prefix, f"{common} --save {tmp_path}/whole")) == 0
    cut = f"{common} --save {tmp_path}/cut --load {tmp_path}/cut"
    assert run_in_process(flags(prefix, f"{cut} --exit-interval 6")) == 0
    assert [e["iteration"] for e in read_metrics(tmp_path / "cut/metrics.jsonl")][-1] == 6
    assert run_in_process(flags(prefix, cut)) == 0
    whole, resumed = (timeless(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert resumed == whole
    assert [e["iteration"] for e in whole if e["kind"] == "train"] == [4, 8]
    assert [e["iteration"] for e in whole if e["kind"] == "test"] == [8]


def test_data_order_is_independent_of_workers_and_dp_size(prefix, tmp_path, capsys):
    """Six combinations give one order; two data-parallel ranks have the losses of one rank."""
    orders = {}
    for size in (1, 2, 4):
        for workers in (0, 4):
            run = run_of(
                flags(prefix, f"{PLAIN} --num-workers {workers} --micro-batch-size 1"), size
            )
            data_sets = build_data_sets(run, Vocabulary(size=VOCABULARY, eod=None, tokenizer={}))
            readers = [
                read_ahead(
                    training_batches(
                        data_sets,
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
                for reader in readers:
                    batch = next(reader)
                    order.append((batch.sample_ids.tolist(), batch.tokens.tolist()))
            for reader in readers:
                if workers:
                    reader.close()
            orders[size, workers] = order
    assert all(order == orders[1, 0] for order in orders.values())
    assert [ids for ids, _ in orders[1, 0]] == [[i] for i in range(8, 32)]

    common = f"{PLAIN} --train-iters 3"
    run_on(1, flags(prefix, f"{common} --num-workers 0 --metrics-file {tmp_path}/1.jsonl"))
    run_on(2, flags(prefix, f"{common} --num-workers 4 --metrics-file {tmp_path}/2.jsonl"))
    assert losses(tmp_path / "2.jsonl") == pytest.approx(losses(tmp_path / "1.jsonl"), rel=1e-5)

    with IndexedDatasetWriter(tmp_path / "bad", np.dtype("<u2")) as writer:
        writer.add_document(np.full(400, VOCABULARY + 9))
    capsys.readouterr()
    assert run_in_process(flags(tmp_path / "bad", f"{common} --split 1 --num-workers 4")) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert f"token id {VOCABULARY + 9} at position" in errors[0]


def _build(rank: int, world: int, folder: str, victim: int | None) -> int:
    """Request the same cache entry from all ranks and return the sum of its values."""

    def build() -> dict[str, np.ndarray]:
        with Path(folder, "builds").open("a") as log:
            print(rank, file=log, flush=True)
        time.sleep(0.3)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"order": np.arange(10000)}

    if victim is not None and rank != victim:
        while not Path(folder, "builds").exists():  # let the victim come first
            time.sleep(0.005)
    cache = IndexCache(Path(folder, "cache"))
    return int(cache.load_or_build("k", {"a": 1}, build, names=("order",))["order"].sum())


@pytest.mark.slow
@pytest.mark.parametrize("victim", [None, 2])
def test_processes_of_a_node_build_an_index_once(tmp_path, victim):
    """A killed builder releases its lock at once, and no rank reads a partial index."""
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


@pytest.mark.slow
def _node(rank: int, world: int, port: int, argvs: list[list[str]]) -> None:
    rank_process(rank, world, port, argvs[rank])


def test_nodes_without_shared_disk_each_build_an_index(prefix, tmp_path):
    """Two ranks have separate data files and cache folders."""
    argvs = []
    for node in range(2):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        for ending in (".bin", ".idx"):
            (folder / f"tokens{ending}").write_bytes(Path(f"{prefix}{ending}").read_bytes())
        options = f"{PLAIN} --train-iters 3 --data-cache-path {folder}/cache"
        argvs.append(flags(folder / "tokens", f"{options} --metrics-file {folder}/metrics.jsonl"))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start_ranks(_node, 2, server.port, argvs, init=False) as ranks:
        outcomes = ranks.outcomes(timeout=60)
        logs = [ranks.log(rank) for rank in range(2)]
    del server
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    cache_names = [
        sorted(p.name for p in (tmp_path / f"node{n}/cache").iterdir()) for n in range(2)
    ]
    assert cache_names[0] == cache_names[1]
    assert sum(name.endswith(".npy") for name in cache_names[0]) == 3
    run_on(1, flags(prefix, f"{PLAIN} --train-iters 3 --metrics-file {tmp_path}/one.jsonl"))
    actual = losses(tmp_path / "node1/metrics.jsonl")
    assert actual == pytest.approx(losses(tmp_path / "one.jsonl"), rel=1e-5)
