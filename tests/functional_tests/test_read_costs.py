# SPDX-License-Identifier: Apache-2.0
"""Files that once took far more time or memory than their size: refused quickly in one line.

The user's command reads each file in a separate, measured process; see
`tests/support/read_limits.py`. Valid files of the same kinds stay readable.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorProperties

from megatron.hf import convert as convert_hf
from megatron.training import checkpoint
from tests.functional_tests.hostile_kinds import save_llama
from tests.support.hf_folders import change_json
from tests.support.inputs import generator
from tests.support.read_limits import ReadCost, ReadLimits, check_read, measure_read, stored_bytes
from tests.support.torch_archives import (
    FILE,
    description,
    metadata,
    number,
    numbers,
    sparse_archive,
    write_folder,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FOUR_ELEMENTS = description(number(4), number(1), count=4)


def convert(folder: Path, *options: str) -> int:
    """Convert a folder of torch.distributed.checkpoint to one file."""
    target = folder.with_suffix(".safetensors")
    target.unlink(missing_ok=True)
    words = ["convert", str(folder), str(target), "--from", "dcp", "--to", "single-file", *options]
    return checkpoint.main(words, {})


@pytest.fixture(scope="module")
def trivial_dcp(tmp_path_factory: pytest.TempPathFactory) -> ReadCost:
    folder = tmp_path_factory.mktemp("trivial") / "dcp"
    write_folder(folder, FOUR_ELEMENTS)
    assert convert(folder) == 0  # imports what forked processes need
    return measure_read(partial(convert, folder))


def dcp_limits(folder: Path) -> ReadLimits:
    return ReadLimits.of(
        stored_bytes(folder), metadata_bytes=(folder / ".metadata").stat().st_size + 1000
    )


def claim_members(folder: Path) -> None:
    """Write a sparse file of 6 GiB that ends like an archive with a 4 GiB list of members."""
    folder.mkdir()
    size, claimed = 6 << 30, 4 << 30
    counts = struct.pack("<IIQQQQ", 0, 0, 3, 3, claimed, 1000)
    end64 = struct.pack("<4sQHH", b"PK\x06\x06", 44, 45, 45) + counts
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, size, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    with (folder / FILE).open("wb") as file:
        file.seek(size)
        file.write(end64 + locator + end)
        length = file.tell()
    (folder / ".metadata").write_bytes(metadata({"a": ([2], [([0], [2], 0, length)])}))


def many_dimensions(folder: Path) -> None:
    """Write 15,000 dimensions that share one number of 2,032 bits, in 61 kB."""
    again = number(1 << 2031) + b"q\x64" + b"h\x64" * 14_999
    write_folder(folder, description(again, again, count=4))


def shared_archive(folder: Path) -> None:
    """Write a hundred tensors that claim the same bytes of a file."""
    write_folder(folder, FOUR_ELEMENTS)
    length = (folder / FILE).stat().st_size
    chunk = ([0], [4], 0, length)
    (folder / ".metadata").write_bytes(metadata({f"a{i}": ([4], [chunk]) for i in range(100)}))


def repeated_instruction(code: bytes, before: bytes = b"") -> Callable[[Path], None]:
    """Return a function that writes 8 MiB of one instruction to `.metadata`."""

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / ".metadata").write_bytes(b"\x80\x04" + before + code * (8 << 20) + b".")

    return write


def changed_properties(state: object) -> Callable[[Path], None]:
    """Return a function that writes a folder whose tensor has other properties."""

    def write(folder: Path) -> None:
        with mock.patch.object(TensorProperties, "__getstate__", return_value=state):
            write_folder(folder, FOUR_ELEMENTS)

    return write


DCP_FOLDERS = {
    "list of members": (claim_members, ("not a valid archive",)),
    "dimensions": (many_dimensions, (FILE, "a[0:4] is refused")),
    "shared bytes": (shared_archive, (FILE, "its tensors take")),
    "dicts": (repeated_instruction(b"}"), (".metadata", "8388611 bytes")),
    "lists": (repeated_instruction(b"]"), (".metadata", "8388611 bytes")),
    "tuples": (repeated_instruction(b"\x85", b")"), (".metadata", "8388612 bytes")),
    "marks": (repeated_instruction(b"("), (".metadata", "refused")),
    "memo": (repeated_instruction(b"\x94", b")"), (".metadata",)),
    **{
        f"properties {state!r}": (changed_properties(state), (".metadata", "properties"))
        for state in ((), "", [], "ab", ((),), 0, {})
    },
}


#: Fast tests: one case of each fault.
QUICK = ("list of members", "dimensions", "dicts", "shared bytes", "properties ()")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow(seconds=2)) for n in DCP_FOLDERS],
)
def test_a_costly_dcp_folder_is_refused_in_one_line(
    name: str, tmp_path: Path, trivial_dcp: ReadCost
) -> None:
    write, texts = DCP_FOLDERS[name]
    folder = tmp_path / "dcp"
    write(folder)
    read = partial(convert, folder)
    check_read(read, limits=dcp_limits(folder), trivial=trivial_dcp, refused=texts)


def test_gap_between_elements_takes_no_memory(tmp_path: Path, trivial_dcp: ReadCost) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    shape, strides = numbers([3, 2]), numbers([1 << 28, 1 << 27])
    sparse_archive(folder / FILE, description(shape, strides, count=3 << 28), 3 << 30)
    chunk = ([0, 0], [3, 2], 0, (folder / FILE).stat().st_size)
    (folder / ".metadata").write_bytes(metadata({"a": ([3, 2], [chunk])}))
    read = partial(convert, folder, "--no-checksums")
    check_read(read, limits=dcp_limits(folder), trivial=trivial_dcp)
    assert torch.equal(load_file(folder.with_suffix(".safetensors"))["a"], torch.zeros(3, 2))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_elements_in_any_order_are_read_in_bounded_spans(
    order: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "megatron.training.checkpointing.commands.dcp_folder.MAX_SPAN_BYTES", 1 << 10
    )
    monkeypatch.setattr("megatron.training.checkpointing.commands.dcp_folder.APART_BYTES", 100)
    values = torch.randn(17, 13, 11, generator=generator(5)).permute(order)
    spaced = torch.randn(7, 50, 6, generator=generator(6))[:, ::3, 1:3]
    dcp.save({"a": values, "b": spaced}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert convert(tmp_path / "dcp") == 0
    tensors = load_file(tmp_path / "dcp.safetensors")
    assert torch.equal(tensors["a"], values)
    assert torch.equal(tensors["b"], spaced)


def import_folder(folder: Path) -> int:
    """Import a Hugging Face folder."""
    target = folder.with_name("imported")
    shutil.rmtree(target, ignore_errors=True)
    return convert_hf.main(["import", "--hf", str(folder), "--save", str(target)], {})


class TrivialHfFolder(NamedTuple):
    """A Hugging Face folder with one weights file, and the cost of reading it."""

    path: Path
    trivial: ReadCost


@pytest.fixture(scope="module")
def trivial_hf_folder(tmp_path_factory: pytest.TempPathFactory) -> TrivialHfFolder:
    path = tmp_path_factory.mktemp("trivial") / "hf"
    save_llama(path, shards=("model.safetensors",))
    assert import_folder(path) == 0  # imports what forked processes need
    return TrivialHfFolder(path, measure_read(partial(import_folder, path)))


def add_tensors(path: Path, entries: dict[str, object]) -> int:
    """Add tensors without bytes to a safetensors file; return the bytes of its header."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps({**json.loads(content[8 : 8 + length]), **entries}, separators=(",", ":"))
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + content[8 + length :])
    return len(header)


#: 200,000 experts in a config of a few bytes.
EXPERTS = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 100_000,
    "num_experts_per_tok": 2,
}


MANY_LAYERS = {**EXPERTS, "num_hidden_layers": 10_000, "num_local_experts": 26}


def empty_tensors(count: int) -> dict[str, object]:
    """Return entries of a header, 74 bytes each at least."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return {f"model.layers.{i}.mlp.x": entry for i in range(count)}


@pytest.mark.parametrize(
    ("tensors", "changes", "texts"),
    [
        (10_000, MANY_LAYERS, ("does not contain the weights", "tensors")),
        (0, EXPERTS, ("does not contain the weights", "tensors")),
        pytest.param(
            *(90_000, {}, ("model.layers.7.mlp.x has no place", "and 89992 more")),
            marks=pytest.mark.slow(seconds=4),
        ),
    ],
    ids=["layers", "experts", "tensors"],
)
def test_a_costly_hugging_face_folder_is_refused_in_one_line(
    tensors: int,
    changes: dict[str, object],
    texts: tuple[str, ...],
    tmp_path: Path,
    trivial_hf_folder: TrivialHfFolder,
) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(trivial_hf_folder.path, folder)
    header = add_tensors(folder / "model.safetensors", empty_tensors(tensors))
    change_json(folder / "config.json", **changes)
    check_read(
        partial(import_folder, folder),
        limits=ReadLimits.of(stored_bytes(folder), metadata_bytes=header),
        trivial=trivial_hf_folder.trivial,
        refused=texts,
    )
