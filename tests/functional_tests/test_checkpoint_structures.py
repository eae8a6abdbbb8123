# SPDX-License-Identifier: Apache-2.0
"""Valid checkpoints of extreme structures: every command reads them, or refuses them in one line,
within CPU seconds and memory that grow with the size of the files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training import checkpoint
from tests.support.edited_manifests import edit_manifest
from tests.support.read_limits import (
    ReadCost,
    ReadLimits,
    measure_read,
    read_faults,
)
from tests.support.stored_structures import (
    STRUCTURES,
    Structure,
    Tensor,
    write_structure,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SINGLE = ("--from", "native", "--to", "single-file")
#: The commands that read checkpoints; `@` stands for the folder of checkpoints.
COMMANDS: dict[str, tuple[str, ...]] = {
    "list": ("list", "@"),
    "list --verify": ("list", "@", "--verify"),
    "verify": ("verify", "@"),
    "inspect": ("inspect", "@", "--tensors"),
    "inspect --json": ("inspect", "@", "--tensors", "--json"),
    "compare": ("compare", "@", "@"),
    "convert": ("convert", "@", "@.safetensors", *SINGLE),
}
#: A separate process writes a structure: forked readers would inherit its objects.
WRITING = ReadLimits(cpu_seconds=120.0, memory_bytes=4 << 30, file_bytes=0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    yield
    torch.set_num_threads(threads)


def run_command(name: str, root: Path) -> int:
    """Run a command on a folder of checkpoints."""
    return checkpoint.main([word.replace("@", str(root)) for word in COMMANDS[name]], {})


def write(root: Path, make: Callable[[], Structure]) -> None:
    """Write the checkpoint that a function describes."""

    def writing() -> int:
        write_structure(root, make())
        return 0

    cost = measure_read(writing, WRITING)
    assert cost.code == 0, cost.text


def limits_of(root: Path, *, times: int = 1) -> ReadLimits:
    """Return the limits of reading a folder of checkpoints `times` times."""
    files = [path for path in root.glob("iter_*/*") if path.is_file()]
    metadata = sum(path.stat().st_size for path in files if path.name == "manifest.json")
    for shard in root.glob("iter_*/*.safetensors"):
        with shard.open("rb") as file:
            metadata += 8 + int.from_bytes(file.read(8), "little")
    size = sum(path.stat().st_size for path in files)
    return ReadLimits.of(times * size, metadata_bytes=times * metadata)


@pytest.fixture(scope="module")
def trivial(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReadCost]:
    """Return a function that measures a command on a trivial checkpoint."""
    root = tmp_path_factory.mktemp("trivial") / "run"
    write_structure(root, Structure(tensors={"w": Tensor(shape=(1,))}))
    return cache(lambda name: measure_read(partial(run_command, name, root)))


def faults_of(root: Path, name: str, trivial: ReadCost, *, refused: str | None = "") -> list[str]:
    """Return the problems of a command on a folder.

    Args:
        root: the folder.
        name: name of the command.
        trivial: cost of the command on a trivial checkpoint.
        refused: expected text of the refusal; "" allows a refusal, None forbids it.
    """
    limits = limits_of(root, times=1 + (name == "compare"))
    cost = measure_read(partial(run_command, name, root), limits)
    faults = read_faults(cost, limits, trivial)
    if cost.code and refused is None:
        faults.append(f"exit code {cost.code}: {cost.text}")
    if refused and (cost.code not in (1, 2) or refused not in cost.text):
        faults.append(f"exit code {cost.code}, no {refused!r} in: {cost.text}")
    return [f"{name}: {fault}" for fault in faults]


def test_pinwheel_of_chunks_is_verified_within_limits(tmp_path, trivial):
    write(tmp_path / "run", lambda: STRUCTURES["pinwheel"](0.15))
    for name in ("list", "verify"):
        assert not faults_of(tmp_path / "run", name, trivial(name), refused=None)


def _without_chunks(fields: dict[str, Any]) -> None:
    fields["tensors"] = {f"{i}": {"dtype": "U8", "shape": [0], "chunks": []} for i in range(20_000)}


def _many_dimensions(fields: dict[str, Any]) -> None:
    ones = [1] * 400_000
    for chunk in fields["tensors"]["w"]["chunks"]:
        chunk.update(sizes=ones, offsets=[0] * 400_000)
    fields["tensors"]["w"]["shape"] = ones


@pytest.mark.parametrize(
    ("change", "refused"),
    [(_without_chunks, "not stored in any file"), (_many_dimensions, "400000 dim")],
)
def test_impossible_manifest_is_refused_within_limits(change, refused, tmp_path, trivial):
    folder = write_structure(tmp_path / "run", Structure(tensors={"w": Tensor(shape=(1,))}))
    edit_manifest(folder, change)
    assert not faults_of(tmp_path / "run", "verify", trivial("verify"), refused=refused)


@pytest.mark.slow(seconds=70)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_command_reads_every_structure_within_limits(structure, tmp_path, trivial):
    root = tmp_path / "run"
    write(root, lambda: STRUCTURES[structure](1.0))
    faults = []
    for name in COMMANDS:
        reads_all = name not in ("compare", "convert")
        faults += faults_of(root, name, trivial(name), refused=None if reads_all else "")
    assert not faults, "\n".join(faults)
