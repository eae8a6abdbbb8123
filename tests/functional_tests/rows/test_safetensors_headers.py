# SPDX-License-Identifier: Apache-2.0
"""Inconsistent safetensors headers are refused in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile
from tests.support.hf_folders import entry, raw_safetensors

F32 = entry("F32", [2], 0, 8)
HEADERS: dict[str, tuple[bytes, str]] = {
    "overlap": (
        raw_safetensors({"a": F32, "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "b overlaps a",
    ),
    "same bytes twice": (raw_safetensors({"a": F32, "b": F32}, bytes(8)), "overlaps"),
    "gap": (
        raw_safetensors({"a": F32, "b": entry("F32", [2], 12, 20)}, bytes(20)),
        "b leaves a gap after a",
    ),
    "hidden data at the end": (raw_safetensors({"a": F32}, bytes(9)), "truncated or has grown"),
    "truncated": (raw_safetensors({"a": F32}, bytes(7)), "truncated or has grown"),
    "header longer than the file": (raw_safetensors({"a": F32}, b"", length=9999), "truncated"),
    "header of 2^63 bytes": (raw_safetensors({"a": F32}, b"", length=1 << 63), "truncated"),
    "no header": (b"abc", "too few for a header's length"),
    "empty": (b"", "has 0 bytes"),
    "no JSON": (raw_safetensors(b"{'a'", b""), "not a JSON object"),
    "no UTF-8": (raw_safetensors(b'{"\xff":1}', b""), "not a JSON object"),
    "a list": (raw_safetensors([], b""), "its header is not a JSON object"),
    "deep": (raw_safetensors(b"[" * 200_000, b""), "not a JSON object"),
    "a name twice": (
        raw_safetensors(b'{"a":%s,"a":%s}' % ((json.dumps(F32).encode(),) * 2), bytes(8)),
        "a name occurs twice",
    ),
    "unknown dtype": (raw_safetensors({"a": entry("Q4", [2], 0, 8)}, bytes(8)), "unknown dtype Q4"),
    "wrong dtype": (
        raw_safetensors({"a": entry("F64", [2], 0, 8)}, bytes(8)),
        "a of F64 [2] takes 16 bytes",
    ),
    "wrong shape": (
        raw_safetensors({"a": entry("F32", [3], 0, 8)}, bytes(8)),
        "a of F32 [3] takes 12 bytes",
    ),
    "huge shape": (
        raw_safetensors({"a": entry("F32", [1 << 62] * 8, 0, 8)}, bytes(8)),
        "but its data_offsets are",
    ),
    "negative shape": (raw_safetensors({"a": entry("F32", [-2], 0, 8)}, bytes(8)), "shape"),
    "many dimensions": (raw_safetensors({"a": entry("F32", [1] * 99, 0, 4)}, bytes(4)), "shape"),
    "numbers as text": (
        raw_safetensors({"a": {**F32, "data_offsets": ["0", "8"]}}, bytes(8)),
        "data_offsets",
    ),
    "true as a number": (raw_safetensors({"a": {**F32, "shape": [True, 2]}}, bytes(8)), "shape"),
    "offsets turned": (raw_safetensors({"a": entry("F32", [2], 8, 0)}, bytes(8)), "data_offsets"),
    "more fields": (raw_safetensors({"a": {**F32, "code": "x"}}, bytes(8)), "must have exactly"),
    "an entry of text": (raw_safetensors({"a": "F32"}, b""), "must have exactly dtype"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_invalid_headers_are_refused(case: str, tmp_path: Path) -> None:
    content, text = HEADERS[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.safetensors") as error:
        SafetensorsFile(path)
    assert text in str(error.value)
    assert len(str(error.value)) < 1000
    path.write_bytes(raw_safetensors({"a": F32}, bytes(8)))  # a valid file passes
    SafetensorsFile(path).close()


def test_a_huge_header_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_safetensors(b"{", b"", length=300 << 20))
    with path.open("r+b") as file:
        file.truncate(301 << 20)  # sparse: the size that the header states, without disk space
    _refused_within(path, "is longer than", 1 << 20)
    entries = b",".join(b'"%d":{}' % i for i in range(100_000))
    path.write_bytes(raw_safetensors(b"{" + entries + b"}", b""))
    # Parsing a header takes at most 40 times its length.
    _refused_within(path, "must have exactly dtype", 40 * len(entries))
    assert 40 * MAX_HEADER_BYTES < 400 << 20


def _refused_within(path: Path, text: str, max_bytes: int) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=text):
        SafetensorsFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < max_bytes
