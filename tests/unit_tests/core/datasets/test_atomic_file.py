# SPDX-License-Identifier: Apache-2.0
"""A file appears whole or not at all, and a failed write leaves nothing."""

import pytest

from megatron.core.datasets.atomic_file import atomic_write


def interrupted(path):
    with atomic_write(path) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt


def test_content_appears_at_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", [[], ["file"]])
def test_an_interrupted_write_changes_nothing(tmp_path, before):
    for name in before:
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == before
    assert all((tmp_path / name).read_bytes() == b"old" for name in before)
