# SPDX-License-Identifier: Apache-2.0
"""The .bin/.idx format byte for byte, its writer, and damaged files."""

import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from megatron.core.datasets import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.indexed_dataset import TOKEN_TYPES, bin_path, idx_path, token_type_for
from megatron.core.untrusted_files import publish

DOCUMENTS_A = [[[1, 2, 3], [4, 5]]]
DOCUMENTS_B = [[[6, 7], [8, 9]]]


def write(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for sequences in documents:
            flat = [token for sequence in sequences for token in sequence]
            writer.add_document(flat, [len(sequence) for sequence in sequences])
    return prefix


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_written_bytes_match_the_format(tmp_path):
    prefix = write(tmp_path / "data", DOCUMENTS_A + DOCUMENTS_B)
    index = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 8)
        + struct.pack("<QQ", 4, 3)
        + struct.pack("<4i", 3, 2, 2, 2)
        + struct.pack("<4q", 0, 6, 10, 14)
        + struct.pack("<3q", 0, 2, 4)
    )
    assert len(index) == 106
    assert idx_path(prefix).read_bytes() == index
    assert bin_path(prefix).read_bytes() == struct.pack("<9H", *range(1, 10))
    assert files_in(tmp_path) == ["data.bin", "data.idx"]


@pytest.mark.parametrize(("code", "dtype"), TOKEN_TYPES.items())
def test_every_token_type_has_its_code_and_reads_back(tmp_path, code, dtype):
    with IndexedDatasetWriter(tmp_path / "data", dtype) as writer:
        writer.add_document(np.array([3, 1, 2], dtype=dtype))
    assert idx_path(tmp_path / "data").read_bytes()[17] == code
    dataset = IndexedDataset(tmp_path / "data")
    assert dataset.dtype == dtype
    assert dataset.get(0).tolist() == [3, 1, 2]


def test_big_endian_input_is_stored_little_endian(tmp_path):
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document(np.array([1, 258], dtype=">u2"))
    assert bin_path(tmp_path / "data").read_bytes() == b"\x01\x00\x02\x01"


def test_batched_writes_equal_single_document_writes(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 50)
    tokens = rng.integers(0, 60000, lengths.sum())
    single, batched = tmp_path / "single", tmp_path / "batched"
    with IndexedDatasetWriter(single, np.uint16) as writer:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document(document)
    with IndexedDatasetWriter(batched, np.uint16) as writer:
        half = int(lengths[:20].sum())
        writer.add_documents(tokens[:half], lengths[:20])
        writer.add_documents(tokens[half:], lengths[20:])
        assert (writer.num_documents, writer.num_tokens) == (50, len(tokens))
    assert idx_path(single).read_bytes() == idx_path(batched).read_bytes()
    assert bin_path(single).read_bytes() == bin_path(batched).read_bytes()


def test_get_reads_slices_of_sequences(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "data", DOCUMENTS_A + DOCUMENTS_B))
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (4, 2, 9)
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.get(0, 1, length=1).tolist() == [2]
    assert dataset.get(3, 2).tolist() == []
    assert dataset.locate(5) == (1, 2, 0)
    assert dataset.locate(4) == (0, 1, 1)
    for index, offset, length in [(4, 0, 1), (-1, 0, 1), (0, 4, None), (0, 1, 3), (0, -1, 1)]:
        with pytest.raises(IndexError):
            dataset.get(index, offset, length=length)
    assert not dataset.get(0).flags.writeable


def test_interrupted_writer_keeps_the_old_files(tmp_path):
    prefix = write(tmp_path / "data", DOCUMENTS_A)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted() -> None:
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            writer.add_document(range(100_000 % 65536))
            assert len(files_in(tmp_path)) > len(before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_failed_writer_keeps_the_old_files(tmp_path, monkeypatch):
    prefix = write(tmp_path / "data", DOCUMENTS_A)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(self: IndexedDatasetWriter, stream: BinaryIO) -> None:
        stream.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(IndexedDatasetWriter, "_write_index", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write(prefix, DOCUMENTS_B)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwrite_removes_old_index_before_publishing_tokens(tmp_path, monkeypatch):
    prefix = write(tmp_path / "data", DOCUMENTS_A)
    published = []

    def watch(temporary: Path, target: Path) -> None:
        published.append((target.name, idx_path(prefix).exists()))
        publish(temporary, target)

    monkeypatch.setattr("megatron.core.datasets.indexed_dataset.publish", watch)
    write(prefix, DOCUMENTS_B)
    assert published == [("data.bin", False), ("data.idx", False)]
    assert IndexedDataset(prefix).get(0).tolist() == [6, 7]


def test_files_appear_only_after_the_writer_closes(tmp_path):
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([1, 2])
        assert not bin_path(tmp_path / "data").exists()
        assert not idx_path(tmp_path / "data").exists()
    assert len(IndexedDataset(tmp_path / "data")) == 1


@pytest.mark.parametrize("bad", [-1, 65536])
def test_a_token_that_would_wrap_around_is_refused(tmp_path, bad):
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        # The bad id lies after the first converted block: no token of this call may be written.
        tokens = np.append(np.zeros(70_000, dtype=np.int64), bad)
        with pytest.raises(ValueError, match="do not fit uint16"):
            writer.add_document(tokens)
        writer.add_document([65535])
    assert bin_path(tmp_path / "data").read_bytes() == b"\xff\xff"


def test_lengths_that_do_not_match_the_tokens_are_refused(tmp_path):
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        with pytest.raises(ValueError, match="sums must agree"):
            writer.add_documents(np.arange(3), np.array([1, 1]))
        with pytest.raises(ValueError, match="sums must agree"):
            writer.add_documents(np.arange(2), np.array([1, 1]), sequences=[1])
        with pytest.raises(ValueError, match="split the document"):
            writer.add_documents(np.arange(2), np.array([3, -1]))
    with pytest.raises(ValueError, match="cannot be stored"):
        IndexedDatasetWriter(tmp_path / "other", np.complex64)


def test_token_type_depends_on_the_vocabulary_size():
    assert token_type_for(65499) == np.uint16
    assert token_type_for(65500) == np.int32


def test_multimodal_modes_are_read(tmp_path):
    prefix = write(tmp_path / "data", DOCUMENTS_A)
    with open(idx_path(prefix), "ab") as stream:
        stream.write(b"\x00\x01")
    dataset = IndexedDataset(prefix)
    assert dataset.modes.tolist() == [0, 1]
    assert dataset.documents.tolist() == [0, 2]


def test_empty_dataset_can_be_opened(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "data", []))
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)


def test_fingerprint_depends_on_index_and_tokens(tmp_path):
    fingerprints = {
        IndexedDataset(write(tmp_path / f"{number}", documents)).fingerprint
        for number, documents in enumerate([[[[1, 2, 3]]], [[[1, 2], [3]]], [[[1, 2, 4]]]])
    }
    assert len(fingerprints) == 3
    repeated = IndexedDataset(write(tmp_path / "same", [[[1, 2, 3]]])).fingerprint
    assert repeated in fingerprints


def overwrite(offset: int, layout: str, *values: int):
    """Return a fault that overwrites numbers of the index."""

    def fault(index: bytes) -> bytes:
        packed_values = struct.pack(layout, *values)
        return index[:offset] + packed_values + index[offset + len(packed_values) :]

    return fault


# The file has 4 sequences and 2 documents: lengths at 34, offsets at 50, documents at 82.
INDEX_FAULTS = {
    "empty": (lambda index: b"", r"data\.idx: at byte 0: end of file; expected a header"),
    "header cut": (lambda index: index[:20], "at byte 20: end of file; expected a header"),
    "lists cut": (lambda index: index[:-1], "at byte 18: .*a file of 105 bytes; expected 106"),
    "lists too long": (lambda index: index + b"abc", "a file of 109 bytes; expected 106"),
    "wrong magic": (overwrite(0, "<B", 0x50), "at byte 0: magic .*check the prefix"),
    "wrong version": (overwrite(9, "<Q", 2), "at byte 9: version 2; expected 1"),
    "wrong token type": (overwrite(17, "<B", 9), "at byte 17: token type 9; expected one of"),
    "huge count": (
        overwrite(18, "<Q", (1 << 64) - 1),
        "at byte 18: 18446744073709551615 sequences",
    ),
    "huge document count": (overwrite(26, "<Q", 1 << 61), "at byte 18: .*document entries"),
    "negative length": (overwrite(38, "<i", -2), "at byte 38: sequence 1 has -2 tokens"),
    "offset outside": (overwrite(58, "<q", 1 << 60), "at byte 58: sequence 1 starts at byte 1152"),
    "negative offset": (overwrite(50, "<q", -2), "at byte 50: sequence 0 starts at byte -2"),
    "offset not rising": (overwrite(66, "<q", 4), "at byte 66: sequence 2 starts at byte 4"),
    "lengths past the end": (overwrite(46, "<i", 100), r"data\.bin: at byte 18: .*truncated"),
    "lengths before the end": (overwrite(46, "<i", 1), r"data\.bin: at byte 16: .*another index"),
    "documents start late": (overwrite(82, "<q", 1), r"at byte 82: .*\[1, 4\]; expected \[0, 4\]"),
    "documents end early": (overwrite(98, "<q", 3), r"at byte 82: .*\[0, 3\]; expected \[0, 4\]"),
    "documents fall": (
        overwrite(90, "<q", 5),
        "at byte 98: document 2 starts at sequence 4, before",
    ),
}


@pytest.mark.parametrize("name", INDEX_FAULTS)
def test_damaged_index_error_is_one_clear_line(tmp_path, name):
    fault, message = INDEX_FAULTS[name]
    prefix = write(tmp_path / "data", DOCUMENTS_A + DOCUMENTS_B)
    idx_path(prefix).write_bytes(fault(idx_path(prefix).read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        IndexedDataset(prefix)
    text = str(caught.value)
    assert "\n" not in text
    assert str(tmp_path) in text
    assert re.search(r"Write the data set again|check the prefix", text)


def rising_in_int64(entries: list[int]) -> bool:
    """Return whether no difference of neighbours is negative after int64 overflow."""
    return all((b - a) % (1 << 64) < 1 << 63 for a, b in pairwise(entries))


@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_documents_whose_differences_wrap_are_refused(tmp_path, monkeypatch, block):
    monkeypatch.setattr("megatron.core.datasets.indexed_dataset._CHECKED_AT_ONCE", block)
    prefix = write(tmp_path / "data", [[[number]] for number in range(4)])
    valid_index = idx_path(prefix).read_bytes()
    top = 1 << 63
    for entries in ([0, top - 1, -top, -1, 4], [0, 4, top - 1, -2, 4], [0, 3, 2, 4, 4]):
        wraps = entries != [0, 3, 2, 4, 4]
        assert rising_in_int64(entries) is wraps
        decrease = next(i for i in range(1, 5) if entries[i] < entries[i - 1])
        idx_path(prefix).write_bytes(valid_index[:-40] + struct.pack("<5q", *entries))
        with pytest.raises(
            ValueError, match=f"document {decrease} starts at sequence {entries[decrease]}"
        ):
            IndexedDataset(prefix)
    for entries in ([0, 0, 0, 4, 4], [0, 4, 4, 4, 4]):
        idx_path(prefix).write_bytes(valid_index[:-40] + struct.pack("<5q", *entries))
        assert IndexedDataset(prefix).documents.tolist() == entries


@pytest.mark.parametrize("change", [-2, -1, 2])
def test_token_file_of_the_wrong_size_is_refused(tmp_path, change):
    prefix = write(tmp_path / "data", DOCUMENTS_A + DOCUMENTS_B)
    tokens = bin_path(prefix).read_bytes()
    bin_path(prefix).write_bytes((tokens + b"xx")[: len(tokens) + change])
    with pytest.raises(ValueError, match=rf"data\.bin: .*has {18 + change} bytes .*the 18 bytes"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_missing_file_is_named_in_the_error(tmp_path, ending):
    prefix = write(tmp_path / "data", DOCUMENTS_A)
    (tmp_path / f"data.{ending}").unlink()
    with pytest.raises(ValueError, match=rf"data\.{ending}: no such file"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("fault_at", [0, 1, 6, 7, 10])
def test_index_checks_cover_every_block(tmp_path, monkeypatch, fault_at):
    monkeypatch.setattr("megatron.core.datasets.indexed_dataset._CHECKED_AT_ONCE", 3)
    prefix = write(tmp_path / "data", [[[number]] for number in range(11)])
    IndexedDataset(prefix)
    index = bytearray(idx_path(prefix).read_bytes())
    struct.pack_into("<q", index, 34 + 44 + 8 * fault_at, 1)
    idx_path(prefix).write_bytes(index)
    with pytest.raises(ValueError, match=f"sequence {fault_at} starts at byte 1 "):
        IndexedDataset(prefix)
