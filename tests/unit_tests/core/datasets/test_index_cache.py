# SPDX-License-Identifier: Apache-2.0
"""Index caches: reused, never half-written, rebuilt when damaged, built by concurrent threads."""

import io
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
    for name, expected in Builder()().items():
        assert arrays[name].dtype == expected.dtype
        np.testing.assert_array_equal(arrays[name], expected)


def only_file(folder: Path, ending: str) -> Path:
    (path,) = folder.glob(f"*{ending}")
    return path


def test_second_use_loads_the_cached_arrays(tmp_path):
    build, cache = Builder(), IndexCache(tmp_path / "new" / "folder")
    arrays = cache.load_or_build("kind", DESCRIPTION, build, names=NAMES)
    check(arrays)
    assert not arrays["rows"].flags.writeable  # memory-mapped: the builder keeps no separate copy
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


def saved_array(array: np.ndarray) -> bytes:
    """Return the content of an array's file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def changed(content: bytes, **fields: Any) -> bytes:
    """Return a manifest with other fields."""
    return json.dumps({**json.loads(content), **fields}).encode()


OBJECTS = np.array([{"a": 1}], dtype=object)
DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated": ("rows.npy", lambda content: content[:-5]),
    "flipped bit": ("rows.npy", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "empty": ("rows.npy", lambda content: b""),
    "wrong shape": ("rows.npy", lambda content: saved_array(np.arange(3))),
    "pickled objects": ("rows.npy", lambda content: saved_array(OBJECTS)),
    "unclosed header": ("rows.npy", lambda content: content.replace(b"}", b"(", 1)),
    "invalid dtype": ("rows.npy", lambda content: content.replace(b"'<i8'", b"'<,8'", 1)),
    "broken key": ("rows.npy", lambda content: content.replace(b"'descr'", b"'de\ncr'", 1)),
    "truncated JSON": (".json", lambda content: content[:-1]),
    "other description": (".json", lambda content: changed(content, description="another")),
    "no arrays": (".json", lambda content: json.dumps({"description": DESCRIPTION}).encode()),
    "a list": (".json", lambda content: b"[]"),
    "a string as arrays": (".json", lambda content: changed(content, arrays="rows")),
    "a missing array": (".json", lambda content: content.replace(b'"rows"', b'"lost"')),
    "object dtype": (".json", lambda content: content.replace(b"<i8", b"O")),
    "unclosed dtype": (".json", lambda content: content.replace(b"<i8", b"i8,(")),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "removed"])
def test_damaged_cache_is_rebuilt_with_a_log_line(tmp_path, caplog, damage):
    build, cache = Builder(), IndexCache(tmp_path)
    cache.load_or_build("kind", DESCRIPTION, build, names=NAMES)
    ending, change = DAMAGE.get(damage, ("rows.npy", None))
    path = only_file(tmp_path, ending)
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
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
    only_file(cache.folder, "rows.npy").write_bytes(program.encode())
    check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert "is damaged" in caplog.text
    assert not canary.exists()


def test_entry_without_a_manifest_is_rebuilt_silently(tmp_path, caplog):
    # A builder that is killed before it writes its last file leaves an entry without a manifest.
    build, cache = Builder(), IndexCache(tmp_path)
    cache.load_or_build("kind", DESCRIPTION, build, names=NAMES)
    only_file(tmp_path, ".json").unlink()
    check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 2
    assert not caplog.records


def test_unwritable_cache_folder_is_logged_and_skipped(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    build, cache = Builder(), IndexCache(tmp_path / "file")
    check(cache.load_or_build("kind", DESCRIPTION, build, names=NAMES))
    assert build.calls == 1
    assert "cannot be written" in caplog.text


class SlowBuilder(Builder):
    """A builder that takes long enough for other threads to arrive while it builds."""

    def __call__(self) -> dict[str, np.ndarray]:
        time.sleep(0.05)
        return super().__call__()


def test_concurrent_builders_build_once(tmp_path, caplog):
    build = SlowBuilder()
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(IndexCache(tmp_path).load_or_build, "kind", DESCRIPTION, build, names=NAMES)
            for _ in range(40)
        ]
    for future in futures:
        check(future.result())
    assert build.calls == 1
    assert not caplog.records
    assert not list(tmp_path.glob("*.tmp"))


def test_damaged_cache_entry_is_rebuilt_and_logged_once(tmp_path, caplog):
    IndexCache(tmp_path).load_or_build("kind", DESCRIPTION, Builder(), names=NAMES)
    path = only_file(tmp_path, "rows.npy")
    path.write_bytes(path.read_bytes()[:-5])
    build = SlowBuilder()
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(IndexCache(tmp_path).load_or_build, "kind", DESCRIPTION, build, names=NAMES)
            for _ in range(4)
        ]
    for future in futures:
        check(future.result())
    assert build.calls == 1
    assert len(caplog.records) == 1
