# SPDX-License-Identifier: Apache-2.0
"""Row 46 for folders of torch.distributed.checkpoint: read on request, and never run."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.boxes import Box
from megatron.training import checkpoint
from megatron.training.checkpoints.dcp_folder import (
    DcpFolder,
    _described,
    _Member,
    read_metadata,
)
from megatron.training.checkpoints.plain_pickle import Name, Persistent, PickledObject, read_pickle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EVIL = b"cposix\nsystem\n(S'touch canary'\ntR"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a sound folder of two tensors and a number, in the current folder."""
    monkeypatch.chdir(tmp_path)
    state = {"a.weight": torch.arange(24.0).view(4, 6), "b": torch.ones(3), "step": 5}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    return tmp_path / "theirs"


def convert(folder: Path, capsys: Any, more: str = "") -> tuple[int, str]:
    """Convert a folder to a file and return the exit code and what stderr holds."""
    capsys.readouterr()
    target = folder.parent / "out.safetensors"
    words = f"convert {folder} {target} --from dcp --to single-file {more}"
    code = checkpoint.main(words.split(), {})
    assert target.exists() == (code == 0)
    assert not list(folder.parent.glob("out.*.tmp-*"))
    return code, capsys.readouterr().err


def change(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of a file by others of the same number."""
    data = path.read_bytes()
    assert old in data
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new))


def would_run(pickle: bytes) -> bool:
    """Tell whether a pickle makes the canary where pickles are loaded, and remove it."""
    loading = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    subprocess.run([sys.executable, "-c", loading], input=pickle, check=False, capture_output=True)
    there = Path("canary").exists()
    Path("canary").unlink(missing_ok=True)
    return there


def test_a_metadata_file_that_runs_a_command_is_refused_by_name(folder, capsys):
    path = folder / ".metadata"
    good = path.read_bytes()
    # Alone, and before a whole and sound one, which would load as if nothing had been.
    for evil in (b"\x80\x04" + EVIL + b".", b"\x80\x04" + EVIL + b"0" + good[2:]):
        path.write_bytes(evil)
        code, err = convert(folder, capsys)
        assert code == 2
        assert f"{path} is refused: it requests posix.system, which no tensor needs" in err
        assert err.count("\n") == 1
        assert not Path("canary").exists()
        assert would_run(evil), "the pickle does nothing: this test shows nothing"


def test_a_tensor_that_runs_a_command_is_refused_by_name(folder, capsys):
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    begin = data.index(b"ctorch._utils\n_rebuild_tensor_v2") - 2
    evil = b"\x80\x02" + EVIL + b"."
    path.write_bytes(data[:begin] + evil + data[begin + len(evil) :])
    code, err = convert(folder, capsys)
    assert code == 2
    assert f"{path}: " in err
    assert "requests posix.system" in err
    assert err.count("\n") == 1
    assert not Path("canary").exists()
    assert would_run(path.read_bytes()[begin:]), "the pickle does nothing"


def test_a_foreign_folder_is_read_on_request_only(folder, capsys):
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


def lead_elsewhere(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder.parent / "x_0.distc")
    change(folder / ".metadata", b"__0_0.distcp", b"../x_0.distc")


def link(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder.parent / "secret")
    (folder / "__0_0.distcp").symlink_to(folder.parent / "secret")


def lie_about_the_shape(folder: Path) -> None:
    change(folder / ".metadata", b"K\x04K\x06\x86", b"K\xffK\xff\x86")


def lie_about_the_dtype(folder: Path) -> None:
    change(folder / ".metadata", b"float32", b"float64")


def cut_short(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-900])


def call_it_packed(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    place = -1
    while (place := data.find(b"PK\x01\x02", place + 1)) >= 0:
        data[place + 10] = 8  # what is packed could unpack to anything
    path.write_bytes(data)


def flip(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    wanted = torch.arange(24.0).numpy().tobytes()
    data = path.read_bytes()
    change(path, wanted, wanted[:40] + bytes([wanted[40] ^ 1]) + wanted[41:])
    assert path.read_bytes() != data


def describe_otherwise(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Return a change of what `data.pkl` says of a.weight, of shape (4, 6) and strides (6, 1)."""

    def spoil(folder: Path) -> None:
        path = folder / "__0_0.distcp"
        data = path.read_bytes()
        begin = data.rindex(b"K\x04K\x06\x86", 0, data.index(torch.arange(24.0).numpy().tobytes()))
        place = data.index(old, begin)
        path.write_bytes(data[:place] + new + data[place + len(old) :])

    return spoil


turn = describe_otherwise(b"K\x06K\x01\x86", b"K\x04K\x01\x86")
lead_outside = describe_otherwise(b"K\x06K\x01\x86", b"K\x07K\x01\x86")


def name_another_order(folder: Path) -> None:
    change(folder / "__0_0.distcp", b"little", b"littlf")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lead_elsewhere, "is stored in '../x_0.distc', not in a plain file name"),
        (link, "__0_0.distcp"),
        (lie_about_the_shape, "a.weight[0:255, 0:255] of 260100 bytes does not fit in bytes"),
        (lie_about_the_dtype, "it contains F32 [4, 6], but .metadata specifies F64 [4, 6]"),
        (cut_short, "it was truncated"),
        (call_it_packed, "it is not a valid archive of torch.save"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "No such file or directory"),
        (flip, "do not match their checksum; if torch wrote none, give --no-checksums"),
        (turn, "its data.pkl does not match its checksum; if torch wrote none, give --no-"),
    ],
)
def test_what_a_folder_claims_is_checked(
    folder: Path, capsys: Any, spoil: Callable[[Path], None], text: str
) -> None:
    spoil(folder)
    code, err = convert(folder, capsys)
    assert code == 2
    assert text in err
    assert str(folder) in err
    assert err.count("\n") == 1
    if spoil in (flip, turn):
        assert convert(folder, capsys, "--no-checksums")[0] == 0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lead_outside, "a tensor of F32 [4, 6] does not fit in 96 bytes"),
        (name_another_order, "its bytes are not in little-endian order"),
    ],
)
def test_what_a_tensor_claims_is_checked_without_checksums_too(
    folder: Path, capsys: Any, spoil: Callable[[Path], None], text: str
) -> None:
    spoil(folder)
    code, err = convert(folder, capsys, "--no-checksums")
    assert (code, err.count("\n")) == (2, 1)
    assert text in err


@pytest.mark.parametrize("spoiled", [2, 3, 4])
@pytest.mark.parametrize("value", [5, None, "ab", Name("torch.float32"), ((),) * 2])
def test_manifest_with_invalid_values_is_refused(spoiled: int, value: Any) -> None:
    """Storage, offset, shape and strides; 4 is the key of the storage."""
    key = value if spoiled == 4 else "0"
    storage = Persistent(("storage", Name("torch.FloatStorage"), key, "cpu", 24))
    described: list[Any] = [storage, 0, (4, 6), (6, 1)]
    members = {"data/0": _Member(begin=64, size=96, crc32=0)}
    if spoiled != 4:
        described[spoiled] = value
    made = PickledObject("torch._utils._rebuild_tensor_v2", tuple(described))
    with pytest.raises(ValueError, match=r"x is refused: it does not describe a tensor"):
        _described(made, members, "x")


def test_no_bytes_do_more_than_raise_an_error(folder):
    """Of hundreds of damaged folders each is read, or refused with a line."""
    chance = random.Random(7)
    metadata, tensors = (folder / name for name in (".metadata", "__0_0.distcp"))
    texts, read = [], 0
    for path, count, checksums in (
        (metadata, 700, True),
        (tensors, 100, True),
        (tensors, 100, False),
    ):
        good = path.read_bytes()
        for _ in range(count):
            bad = bytearray(good)
            for _ in range(chance.randint(1, 3)):
                bad[chance.randrange(len(bad))] = chance.randrange(256)
            del bad[chance.choice([len(bad), len(bad), chance.randrange(len(bad))]) :]
            path.write_bytes(bad)
            try:
                if path == metadata:
                    read_metadata(folder)
                else:
                    with DcpFolder(folder, checksums=checksums) as opened:
                        for name, shape in (("a.weight", (4, 6)), ("b", (3,))):
                            opened.find(name)
                            whole = Box((0,) * len(shape), shape)
                            opened.read_box(name, whole, torch.empty(shape))
                read += 1
            except ValueError as error:
                texts.append(str(error))
        path.write_bytes(good)
    assert min(read, len(texts)) > 50
    assert all(str(folder) in text for text in texts)


@pytest.mark.parametrize(
    ("pickle", "text"),
    [
        (b"\x80\x04\x8d" + b"\xff" * 6 + b"\x00\x00.", "it is damaged"),  # text without end
        (b"\x80\x04\x8e" + b"\xff" * 6 + b"\x00\x00.", "the instruction BINBYTES8"),
        (b"\x80\x04Nr\xff\xff\xff\xff.", None),  # a place in the memo far away
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
