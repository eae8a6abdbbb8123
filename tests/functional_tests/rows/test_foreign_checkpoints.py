# SPDX-License-Identifier: Apache-2.0
"""Folders of torch.distributed.checkpoint: read only on request, their pickles never run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.training import checkpoint
from megatron.training.checkpointing.commands.plain_pickle import read_pickle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EVIL = b"cposix\nsystem\n(S'touch canary'\ntR"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a valid folder of two tensors and a number, in the current folder."""
    monkeypatch.chdir(tmp_path)
    state = {"a.weight": torch.arange(24.0).view(4, 6), "b": torch.ones(3), "step": 5}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    return tmp_path / "theirs"


def convert(folder: Path, capsys: Any, options: str = "") -> tuple[int, str]:
    """Convert a folder to a file and return the exit code and stderr."""
    capsys.readouterr()
    target = folder.parent / "out.safetensors"
    words = f"convert {folder} {target} --from dcp --to single-file {options}"
    code = checkpoint.main(words.split(), {})
    assert target.exists() == (code == 0)
    assert not list(folder.parent.glob("out.*.tmp-*"))
    return code, capsys.readouterr().err


def change(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of a file by as many other bytes."""
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))


def pickle_runs_command(pickle: bytes) -> bool:
    """Return whether `pickle.load` creates the canary file, and remove the file."""
    loading = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    subprocess.run([sys.executable, "-c", loading], input=pickle, check=False, capture_output=True)
    canary_exists = Path("canary").exists()
    Path("canary").unlink(missing_ok=True)
    return canary_exists


def test_metadata_that_runs_a_command_is_refused_by_name(folder, capsys):
    path = folder / ".metadata"
    good = path.read_bytes()
    # Alone, and before a valid pickle, which would still load.
    for evil in (b"\x80\x04" + EVIL + b".", b"\x80\x04" + EVIL + b"0" + good[2:]):
        path.write_bytes(evil)
        code, err = convert(folder, capsys)
        assert code == 2
        assert f"{path} is refused: it requests posix.system, which no tensor needs" in err
        assert err.count("\n") == 1
        assert not Path("canary").exists()
        assert pickle_runs_command(evil), "the pickle does nothing: the test proves nothing"


def test_tensor_that_runs_a_command_is_refused_by_name(folder, capsys):
    path = folder / "__0_0.distcp"
    content = path.read_bytes()
    begin = content.index(b"ctorch._utils\n_rebuild_tensor_v2") - 2
    evil = b"\x80\x02" + EVIL + b"."
    path.write_bytes(content[:begin] + evil + content[begin + len(evil) :])
    code, err = convert(folder, capsys)
    assert code == 2
    assert f"{path}: " in err
    assert "requests posix.system" in err
    assert err.count("\n") == 1
    assert not Path("canary").exists()
    assert pickle_runs_command(path.read_bytes()[begin:]), "the pickle does nothing"


def test_dcp_folder_is_read_only_on_request(folder, capsys):
    (folder / ".metadata").write_bytes(b"\x80\x04" + EVIL + b".")
    capsys.readouterr()
    for words in (
        f"convert {folder} out.safetensors --from native --to single-file",
        f"inspect {folder}",
        f"verify {folder}",
        f"compare {folder} {folder}",
    ):
        assert checkpoint.main(words.split(), {}) == 2
        assert "contains no checkpoint" in capsys.readouterr().err
    assert checkpoint.main(["list", str(folder)], {}) == 0
    assert not Path("canary").exists()


def point_outside_folder(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder.parent / "x_0.distc")
    change(folder / ".metadata", b"__0_0.distcp", b"../x_0.distc")


def link(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder.parent / "secret")
    (folder / "__0_0.distcp").symlink_to(folder.parent / "secret")


def change_shape(folder: Path) -> None:
    change(folder / ".metadata", b"K\x04K\x06\x86", b"K\xffK\xff\x86")


def change_dtype(folder: Path) -> None:
    change(folder / ".metadata", b"float32", b"float64")


def truncate(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-900])


def mark_as_compressed(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    offset = -1
    while (offset := content.find(b"PK\x01\x02", offset + 1)) >= 0:
        content[offset + 10] = 8  # compressed data could unpack to any size
    path.write_bytes(content)


def flip(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    values = torch.arange(24.0).numpy().tobytes()
    content = path.read_bytes()
    change(path, values, values[:40] + bytes([values[40] ^ 1]) + values[41:])
    assert path.read_bytes() != content


def change_pickle(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Return a change of a.weight's entry in `data.pkl`, with shape (4, 6) and strides (6, 1)."""

    def spoil(folder: Path) -> None:
        path = folder / "__0_0.distcp"
        content = path.read_bytes()
        begin = content.rindex(
            b"K\x04K\x06\x86", 0, content.index(torch.arange(24.0).numpy().tobytes())
        )
        offset = content.index(old, begin)
        path.write_bytes(content[:offset] + new + content[offset + len(old) :])

    return spoil


transpose_strides = change_pickle(b"K\x06K\x01\x86", b"K\x04K\x01\x86")
exceed_storage = change_pickle(b"K\x06K\x01\x86", b"K\x07K\x01\x86")


def change_byte_order(folder: Path) -> None:
    change(folder / "__0_0.distcp", b"little", b"littlf")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (point_outside_folder, "is stored in '../x_0.distc', not in a plain file name"),
        (link, "__0_0.distcp"),
        (change_shape, "a.weight[0:255, 0:255] of 260100 bytes does not fit in bytes"),
        (change_dtype, "it contains F32 [4, 6], but .metadata specifies F64 [4, 6]"),
        (truncate, "it was truncated"),
        (mark_as_compressed, "it is not a valid archive of torch.save"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "No such file or directory"),
        (flip, "do not match their checksum; if torch wrote none, give --no-checksums"),
        (
            transpose_strides,
            "its data.pkl does not match its checksum; if torch wrote none, give --no-",
        ),
    ],
)
def test_inconsistent_dcp_folder_is_refused(
    folder: Path, capsys: Any, spoil: Callable[[Path], None], text: str
) -> None:
    spoil(folder)
    code, err = convert(folder, capsys)
    assert code == 2
    assert text in err
    assert str(folder) in err
    assert err.count("\n") == 1
    if spoil in (flip, transpose_strides):
        assert convert(folder, capsys, "--no-checksums")[0] == 0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (exceed_storage, "a tensor of F32 [4, 6] does not fit in 96 bytes"),
        (change_byte_order, "its bytes are not in little-endian order"),
    ],
)
def test_tensor_bounds_are_checked_without_checksums(
    folder: Path, capsys: Any, spoil: Callable[[Path], None], text: str
) -> None:
    spoil(folder)
    code, err = convert(folder, capsys, "--no-checksums")
    assert (code, err.count("\n")) == (2, 1)
    assert text in err


@pytest.mark.parametrize(
    ("pickle", "text"),
    [
        (b"\x80\x04\x8d" + b"\xff" * 6 + b"\x00\x00.", "it is damaged"),  # text without end
        (b"\x80\x04\x8e" + b"\xff" * 6 + b"\x00\x00.", "the instruction BINBYTES8"),
        (b"\x80\x04Nr\xff\xff\xff\xff.", None),  # a far index in the memo
        (b"\x80\x04(lp0\n.", "the instruction LIST"),
        (b"\x80\x04" + b"(" * 5000 + b"t" * 5000 + b".", None),  # nested deeply
        (b"\x80\x04N", "it is damaged"),
        (b"", "it is damaged"),
        (b"\x80\x04NN.", "it is damaged"),
        (b"\x80\x04]\x86.", "it is damaged"),
        (b"\x80\x04K\x01K\x02R.", "it is damaged"),
        (b"\x80\x04cbuiltins\neval\n.", "requests builtins.eval"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "requests posix.system"),
        (b"\x80\x04\x82\x01.", "the instruction EXT1"),
    ],
)
def test_malicious_pickles_use_no_memory_and_run_nothing(pickle, text):
    if text is None:
        read_pickle(pickle, frozenset(), "it")
        return
    with pytest.raises(ValueError, match="it is refused") as caught:
        read_pickle(pickle, frozenset(), "it")
    assert text in str(caught.value)
