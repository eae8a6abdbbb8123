# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: a file appears complete or not at all, and a failed write leaves no file."""

import pytest

from megatron.core.datasets.atomic_file import atomic_write


def write_and_interrupt(path):
    with atomic_write(path) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt


def test_content_appears_only_when_the_write_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("existing", [[], ["file"]])
def test_an_interrupted_write_changes_nothing(tmp_path, existing):
    for name in existing:
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == existing
    assert all((tmp_path / name).read_bytes() == b"old" for name in existing)
