# SPDX-License-Identifier: Apache-2.0
"""The sample order of runs that are resumed, use other layouts, or have no shared disk."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.cli.flags import parse_command_line
from megatron.training import train_steps
from megatron.training.config import Config
from megatron.training.config.resolve import ResolvedRun, resolve
from megatron.training.data.data_sets import build_data_sets, read_ahead, training_batches
from megatron.training.data.vocabulary import Vocabulary
from tests.functional_tests.small_run import (
    VOCABULARY,
    flags,
    run_in_process,
    write_tokens,
)

PLAIN = "--attention-dropout 0 --hidden-dropout 0 --eval-interval 0"


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


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
