# SPDX-License-Identifier: Apache-2.0
"""Generated hostile files of every kind are refused in one line.

The entry points read each file in a forked process, limited to 1 GiB of additional memory and 10 s
of CPU time including child processes. `hostile_kinds.trial` repeats a single failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.functional_tests.hostile_kinds import KINDS, make_bases, sound_trial, trial
from tests.functional_tests.structures import STRUCTURES, structure_faults
from tests.support.read_limits import ReadLimits, measure_read

#: Numbers of files in fast tests and in slow tests; the slow tests continue after the fast ones.
NUM_QUICK, NUM_MANY = 240, 10_000

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the root of the valid folders."""
    root = tmp_path_factory.mktemp("sound")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    make_bases(root)
    yield root
    torch.set_num_threads(threads)


#: Kinds that no reader refuses: a run falls back to an older checkpoint, caches are rebuilt.
RECOVERED = {"tracker", "shard", "cached order", "cached manifest"}
#: A trial is stopped after 10 s of CPU time, including child processes, and above 1 GiB.
LIMITS = ReadLimits(cpu_seconds=8.0, memory_bytes=0, file_bytes=0)


def read_all(bases: Path, scratch: Path, cases: list[tuple[str, int]]) -> None:
    """Read hostile files and assert that some are refused and none breaks a reader."""
    codes: dict[tuple[str, int], int | None] = {}
    faults = []
    for name, number in cases:
        read = partial(trial, bases, scratch, name, number)
        cost = measure_read(read, LIMITS, libraries_print=True)
        codes[name, number] = cost.code
        if cost.code is None:
            faults.append(f"{name} {number}: {cost.text}")
    assert not faults, f"{len(faults)} of {len(cases)}:\n" + "\n".join(faults[:20])
    refused = {name for (name, _), code in codes.items() if code == 2}
    kinds = {name for name, _ in cases} - RECOVERED
    assert len(refused) > len(kinds) // 2 or not kinds


@pytest.mark.parametrize("offset", range(4))
def test_hostile_files_are_refused_in_one_line(offset: int, bases: Path, tmp_path: Path) -> None:
    cases = [(name, n) for n in range(-(-NUM_QUICK // len(KINDS))) for name in KINDS]
    read_all(bases, tmp_path, cases[offset:NUM_QUICK:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_reader_accepts_valid_files(name: str, bases: Path, tmp_path: Path) -> None:
    for number in range(len(KINDS[name].readers)):
        read = partial(sound_trial, bases, tmp_path, name, number)
        cost = measure_read(read, LIMITS, libraries_print=True)
        assert cost.code == 0, (number, cost.text)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", KINDS)
def test_many_hostile_files_are_refused_in_one_line(name: str, bases: Path, tmp_path: Path) -> None:
    start, count = NUM_QUICK // len(KINDS) + 1, -(-NUM_MANY // len(KINDS))
    read_all(bases, tmp_path, [(name, n) for n in range(start, start + count)])


#: File sizes in fast and in slow tests.
QUICK_BYTES, SLOW_BYTES = 300_000, 14_000_000


@pytest.mark.parametrize(
    "name",
    [
        *("deep_json in config.json", "many_small_objects in tokenizer_config.json", "files"),
        *("tensors", "stored tensors", "chunks", "sequences", "long text", "vocabulary", "YAML"),
    ],
)
def test_valid_structure_stays_within_cost_of_its_size(
    name: str, bases: Path, tmp_path: Path
) -> None:
    assert not structure_faults(bases, tmp_path, name, seed=0, size=QUICK_BYTES)


@pytest.mark.slow(seconds=400)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", STRUCTURES)
def test_large_valid_structure_stays_within_cost_of_its_size(
    name: str, seed: int, bases: Path, tmp_path: Path
) -> None:
    assert not structure_faults(bases, tmp_path, name, seed=seed, size=SLOW_BYTES)
