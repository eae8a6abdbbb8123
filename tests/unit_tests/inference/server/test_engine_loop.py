# SPDX-License-Identifier: Apache-2.0
"""Frames."""

from __future__ import annotations

import pytest

from megatron.inference.server.protocol import LENGTH, MAX_FRAME_BYTES, FrameReader, frame

MESSAGES = [{"kind": "a", "text": "é\n" * 9}, {"kind": "b"}, {"kind": "c", "ids": list(range(99))}]


@pytest.mark.parametrize("size", [1, 3, 64, 1 << 20])
def test_frames_come_whole_however_they_are_split(size: int) -> None:
    data = b"".join(map(frame, MESSAGES))
    reader, found = FrameReader(), []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    assert found == MESSAGES


def test_a_frame_that_is_too_long_is_refused_by_its_head() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES + 1)):
        FrameReader().feed(LENGTH.pack(MAX_FRAME_BYTES + 1))
