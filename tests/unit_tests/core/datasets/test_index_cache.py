# SPDX-License-Identifier: Apache-2.0
"""Index caches: found again, never half-written, rebuilt when damaged, built by many at once."""

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.index_cache import IndexCache

DESCRIPTION = {"seed": 1, "source": "abc"}
NAMES = ("order", "rows", "empty")


class Builder:
    """Build the same arrays each time and count how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {
            "order": np.arange(1000, dtype=np.uint32)[::-1].copy(),
            "rows": np.arange(2000, dtype=np.int64).reshape(-1, 2),
            "empty": np.empty((0, 2), dtype=np.int32),
        }


def check(arrays: dict[str, np.ndarray]) -> None:
    for name, wanted in Builder()().items():
        assert arrays[name].dtype == wanted.dtype
        np.testing.assert_array_equal(arrays[name], wanted)


def one(folder: Path, ending: str) -> Path:
    (path,) = folder.glob(f"*{ending}")
    return path


def test_second_use_reads_what_the_first_wrote(tmp_path):
    build, cache = Builder(), IndexCache(tmp_path / "new" / "folder")
    first = cache.load_or_build("kind", DESCRIPTION, build, names=NAMES)
    check(first)
    assert not first["rows"].flags.writeable  # mapped: the builder keeps no copy of its own
    check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 1
    assert not list(cache.folder.glob("*.tmp"))
    cache.load_or_build("kind", {**DESCRIPTION, "seed": 2}, build, names=NAMES)
    cache.load_or_build("other", DESCRIPTION, build, names=NAMES)
    assert build.calls == 3


def test_index_is_not_cached_without_a_folder(tmp_path):
    build = Builder()
    for _ in range(2):
        check(IndexCache(None).load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_shape(path: Path) -> None:
    np.save(path, np.arange(3))


def pickled(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def open_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"}", b"(", 1))


def bad_type(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"'<i8'", b"'<,8'", 1))


def no_name(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"'descr'", b"'de\ncr'", 1))


@pytest.mark.parametrize(
    "damage",
    [
        *(truncate, flip_last_bit, empty, other_shape, pickled, Path.unlink),
        *(open_header, bad_type, no_name),
    ],
)
def test_a_damaged_array_is_rebuilt_with_a_log_line(tmp_path, caplog, damage):
    build, cache = Builder(), IndexCache(tmp_path)
    cache.load_or_build("kind", DESCRIPTION, build, names=NAMES)
    damage(one(tmp_path, "rows.npy"))
    with caplog.at_level(logging.WARNING):
        check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 2
    assert "is damaged" in caplog.text
    check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 2


def test_a_cache_file_cannot_run_code(tmp_path, caplog):
    build, cache = Builder(), IndexCache(tmp_path / "cache")
    cache.load_or_build("kind", DESCRIPTION, build, names=NAMES)
    canary = tmp_path / "canary"
    program = f"cos\nsystem\n(S'touch {canary}'\ntR."  # a pickle that calls os.system
    one(cache.folder, "rows.npy").write_bytes(program.encode())
    check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert "is damaged" in caplog.text
    assert not canary.exists()


def garbage(text: str) -> str:
    return text[:-1]


def other_description(text: str) -> str:
    manifest = json.loads(text)
    return json.dumps({**manifest, "description": "another"})


def no_arrays(text: str) -> str:
    return json.dumps({"description": json.loads(text)["description"]})


def a_list(text: str) -> str:
    return "[]"


def a_name(text: str) -> str:
    return json.dumps({**json.loads(text), "arrays": "rows"})


def fewer_arrays(text: str) -> str:
    manifest = json.loads(text)
    del manifest["arrays"]["rows"]
    return json.dumps(manifest)


def objects(text: str) -> str:
    return text.replace("<i8", "O")


def open_dtype(text: str) -> str:
    return text.replace("<i8", "i8,(")


@pytest.mark.parametrize(
    "damage",
    [
        *(garbage, other_description, no_arrays, a_list, a_name, fewer_arrays),
        *(objects, open_dtype),
    ],
)
def test_a_damaged_manifest_is_rebuilt_with_a_log_line(tmp_path, caplog, damage):
    build, cache = Builder(), IndexCache(tmp_path)
    cache.load_or_build("kind", DESCRIPTION, build, names=NAMES)
    path = one(tmp_path, ".json")
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 2
    assert "is damaged" in caplog.text


def test_an_entry_without_its_manifest_does_not_exist(tmp_path, caplog):
    # What a builder killed before its last file leaves behind.
    build, cache = Builder(), IndexCache(tmp_path)
    cache.load_or_build("kind", DESCRIPTION, build, names=NAMES)
    one(tmp_path, ".json").unlink()
    check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 2
    assert not caplog.records


def test_a_folder_that_cannot_be_written_costs_a_log_line(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    build, cache = Builder(), IndexCache(tmp_path / "file")
    check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 1
    assert "cannot be written" in caplog.text


class SlowBuilder(Builder):
    """Take long enough for others to come while it builds."""

    def __call__(self) -> dict[str, np.ndarray]:
        time.sleep(0.05)
        return super().__call__()


def test_many_builders_at_once_build_once(tmp_path, caplog):
    build = SlowBuilder()
    with ThreadPoolExecutor(8) as pool:
        uses = [
            pool.submit(IndexCache(tmp_path).load_or_build, "kind", DESCRIPTION, build, names=NAMES)
            for _ in range(40)
        ]
    for use in uses:
        check(use.result())
    assert build.calls == 1
    assert not caplog.records
    assert not list(tmp_path.glob("*.tmp"))


def test_damaged_cache_entry_is_rebuilt_and_logged_once(tmp_path, caplog):
    IndexCache(tmp_path).load_or_build("kind", DESCRIPTION, Builder(), names=NAMES)
    truncate(one(tmp_path, "rows.npy"))
    build = SlowBuilder()
    with ThreadPoolExecutor(4) as pool:
        uses = [
            pool.submit(IndexCache(tmp_path).load_or_build, "kind", DESCRIPTION, build, names=NAMES)
            for _ in range(4)
        ]
    for use in uses:
        check(use.result())
    assert build.calls == 1
    assert len(caplog.records) == 1
