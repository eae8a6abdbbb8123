# SPDX-License-Identifier: Apache-2.0
"""Untrusted files: which files are read, which are refused, and no write through a link."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.untrusted_files import (
    UnsafeFileError,
    atomic_write,
    make_folder,
    open_lock,
    open_to_write,
    parse_json,
    read_json,
    read_regular,
    read_text,
    replace_file,
    replacing,
    write_to,
)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_outside_link(path: Path) -> None:
    (path.parent.parent / "outside").write_text("secret")
    path.symlink_to(path.parent.parent / "outside")


def make_sparse_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 200 << 30)


UNSAFE_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link outside": make_outside_link,
    "broken link": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "200 GiB sparse file": make_sparse_file,
}


@pytest.mark.parametrize("case", UNSAFE_FILES)
def test_reading_refuses_all_but_bounded_regular_files(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    UNSAFE_FILES[case](folder / "a.json")
    with pytest.raises(OSError) as caught:
        read_json(folder / "a.json")
    assert "a.json" in str(caught.value)


def test_user_named_file_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    make_outside_link(tmp_path / "f" / "a")
    assert read_text(tmp_path / "f" / "a", 6, follow_links=True) == "secret"
    with pytest.raises(UnsafeFileError, match="6 bytes"):
        read_regular(tmp_path / "f" / "a", 5, follow_links=True)


def test_links_to_hub_blobs_and_within_a_folder_are_read(tmp_path: Path) -> None:
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / "123" / "inner"
    (model / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "blobs" / "d1").write_text("{}")
    (model / "other").write_text("{}")
    (model / "blobs" / "d2").symlink_to("../other")
    (snapshot / "a.json").symlink_to("../../../blobs/d1")
    (snapshot / "b.json").symlink_to("a.json")
    (snapshot / "c.json").symlink_to("../../../blobs/d2")
    (snapshot / "d.json").symlink_to("../../../other")
    assert read_json(snapshot / "a.json") == read_json(snapshot / "b.json") == {}
    for name in ("c.json", "d.json"):
        with pytest.raises(UnsafeFileError, match="outside"):
            read_json(snapshot / name)


def test_invalid_names_and_invalid_utf8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsafeFileError):
        read_regular(tmp_path / "a\0b", 10)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent", 10)
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(UnsafeFileError, match="UTF-8"):
        read_text(tmp_path / "a", 10)


@pytest.mark.parametrize(("begin", "inner", "end"), [("[", "[]", "]"), ('{"a":', "{}", "}")])
def test_json_nesting_is_limited_to_max_depth(begin: str, inner: str, end: str) -> None:
    def text(depth: int) -> str:
        return begin * (depth - 1) + inner + end * (depth - 1)

    assert parse_json(text(7), max_depth=7) == json.loads(text(7))
    for depth in (8, 100_000):
        with pytest.raises(ValueError, match="nested deeper than 7"):
            parse_json(text(depth), max_depth=7)


@pytest.mark.parametrize("value", ["{}", "[[[]]]"])
def test_json_with_too_many_values_is_refused_before_parsing(value: str) -> None:
    text = "[" + ",".join([value] * (12_000_000 // (len(value) + 1))) + "]"
    for form in (text, text.encode()):
        with pytest.raises(ValueError, match=f"its {len(text)} characters contain more values"):
            parse_json(form)
    shorter = text[: text.index(",", 1_000_000)] + "]"
    assert len(parse_json(shorter)) > 100_000


def test_large_json_index_and_vocabulary_are_read() -> None:
    names = {f"model.layers.{i}.mlp.down_proj.weight": "model-1.safetensors" for i in range(90_000)}
    assert parse_json(json.dumps(names)) == names
    vocabulary = {f"token{i}": i for i in range(250_000)}
    assert parse_json(json.dumps(vocabulary)) == vocabulary


@pytest.fixture
def linked(tmp_path: Path) -> tuple[Path, Path]:
    """Return a link in a folder and its target outside the folder."""
    (tmp_path / "f").mkdir()
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / "f" / "a").symlink_to(target)
    return tmp_path / "f" / "a", target


def test_nothing_is_written_through_a_link(linked: tuple[Path, Path]) -> None:
    link, target = linked
    for mode in ("a", "r+", "a+"):
        with pytest.raises(UnsafeFileError, match="a is a link"):
            open_to_write(link, mode)
    with pytest.raises(UnsafeFileError, match="a is a link"):
        open_lock(link)
    with pytest.raises(FileExistsError):
        open_to_write(link, "x")
    with write_to(link, "w") as file:
        file.write("new")
    assert not link.is_symlink()
    assert link.read_text() == "new"
    link.unlink()
    for write in (
        lambda: replace_file(link, "newer"),
        lambda: replace_file(link, b"newer", sync=True),
    ):
        link.symlink_to(target)
        write()
        assert not link.is_symlink()
        assert link.read_text() == "newer"
        link.unlink()
    assert target.read_text() == "precious"


def test_atomic_write_replaces_a_link_not_its_target(linked: tuple[Path, Path]) -> None:
    link, target = linked

    def fail() -> None:
        with replacing(link) as draft:
            draft.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert link.is_symlink()
    assert os.listdir(link.parent) == ["a"]
    with replacing(link) as draft:
        draft.write_text("whole")
    assert link.read_text() == "whole"
    assert target.read_text() == "precious"
    assert os.listdir(link.parent) == ["a"]


@pytest.mark.parametrize("case", ["pipe", "socket", "folder"])
def test_only_regular_files_are_written_to(case: str, tmp_path: Path) -> None:
    UNSAFE_FILES[case](tmp_path / "a")
    for mode in ("a", "r+", "a+", "x"):
        with pytest.raises(OSError):
            open_to_write(tmp_path / "a", mode)
    with pytest.raises(OSError):
        open_lock(tmp_path / "a")


def test_file_with_two_hard_links_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / "a")
    for mode in ("a", "r+", "a+"):
        with pytest.raises(UnsafeFileError, match="hard links"):
            open_to_write(tmp_path / "a", mode)
    with write_to(tmp_path / "a", "w") as file:
        file.write("new")
    assert (tmp_path / "precious").read_text() == "precious"


def test_links_below_the_root_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "root"
    root.symlink_to(tmp_path / "real")  # the user's choice
    make_folder(root / "stacks" / "of", root=root)
    with write_to(root / "stacks" / "of" / "a", "w", root=root) as file:
        file.write("made")
    assert (tmp_path / "real" / "stacks" / "of" / "a").read_text() == "made"
    (tmp_path / "real" / "out").symlink_to(tmp_path / "elsewhere")
    for write in (
        lambda: write_to(root / "out" / "a", "w", root=root),
        lambda: replace_file(root / "out" / "of" / "a", "text", root=root),
        lambda: make_folder(root / "out", root=root),
    ):
        with pytest.raises(UnsafeFileError, match="out is a link"):
            write()
    assert not os.listdir(tmp_path / "elsewhere")
    make_folder(root / "new" / "er", root=root)
    assert (tmp_path / "real" / "new" / "er").is_dir()


def write_and_interrupt(path: Path) -> None:
    with atomic_write(path) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt


def test_content_appears_only_when_the_write_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("existing", [[], ["file"]])
def test_an_interrupted_write_changes_nothing(tmp_path: Path, existing: list[str]) -> None:
    for name in existing:
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == existing
    assert all((tmp_path / name).read_bytes() == b"old" for name in existing)
