# SPDX-License-Identifier: Apache-2.0
r"""Megatron's `.bin/.idx` token files: memory-mapped reader and streaming writer.

`<prefix>.bin` holds the tokens of all sequences back to back, without a header. `<prefix>.idx`,
little endian, divides it into sequences and documents:

    offset        type        content
    0             9 bytes     b"MMIDIDX\0\0"
    9             uint64      version, 1
    17            uint8       token type (TOKEN_TYPES)
    18            uint64      S, the number of sequences
    26            uint64      D, the length of the document list (documents + 1)
    34            int32[S]    tokens of each sequence
    34 + 4S       int64[S]    byte offset of each sequence in the .bin
    34 + 12S      int64[D]    sequence at which each document starts; first 0, last S
    34 + 12S + 8D int8[S]     modes, only in multimodal data

The reader checks the whole index against the two files when it opens them, so that a truncated or
foreign file is reported in one line before training, and never causes a crash or a wrong token. The
writer streams and checks, and publishes its files under their names only when they are complete.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import BinaryIO

import numpy as np

from megatron.core.untrusted_files import open_regular, open_to_write, publish, sync_folder

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: Mapping[int, np.dtype] = MappingProxyType(
    {
        1: np.dtype("u1"),
        2: np.dtype("i1"),
        3: np.dtype("<i2"),
        4: np.dtype("<i4"),
        5: np.dtype("<i8"),
        6: np.dtype("<f8"),
        7: np.dtype("<f4"),
        8: np.dtype("<u2"),
    }
)
# Sequences checked at a time: opening a file of 10^9 sequences must not need 20 GB.
_CHECKED_AT_ONCE = 1 << 20
_FINGERPRINT_END_BYTES = 1 << 16


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the tokens of a data set."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the index of a data set."""
    return Path(f"{prefix}.idx")


def token_type_for(vocab_size: int) -> np.dtype:
    """Return the smallest token type Megatron stores a vocabulary in.

    Args:
        vocab_size: number of token ids.

    Returns:
        uint16 below 65,500 ids, else int32.
    """
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def _bad(path: Path, offset: int, actual: str, expected: str, fix: str) -> ValueError:
    return ValueError(f"{path}: at byte {offset}: {actual}; expected {expected}. {fix}")


_REWRITE = "Write the data set again (python -m megatron.training.preprocess_data) or copy it anew."


class IndexedDataset:
    """Random access to the sequences of one `.bin/.idx` pair.

    Nothing is copied: all arrays are views of mapped files, shared by the processes of a node.

    Args:
        prefix: path without `.bin` or `.idx`.

    Raises:
        ValueError: a file is missing, truncated, foreign, or contradicts the other
            one; the message names the file, the byte, what was expected and how to fix it.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        for path in (self._idx, self._bin):
            if not os.path.isfile(path):
                raise ValueError(
                    f"{path}: no such file; a data set is the pair {self._idx.name} and "
                    f"{self._bin.name}, named by its path without the ending."
                )
        self._bin_bytes = self._bin.stat().st_size
        self.dtype, num_sequences, document_entries = self._read_header()
        raw = np.memmap(self._idx, dtype=np.uint8, mode="r").view(np.ndarray)
        lengths_at = HEADER.size
        offsets_at = lengths_at + 4 * num_sequences
        documents_at = offsets_at + 8 * num_sequences
        modes_at = documents_at + 8 * document_entries
        self.lengths: np.ndarray = raw[lengths_at:offsets_at].view("<i4")  # [S] tokens
        self.byte_offsets: np.ndarray = raw[offsets_at:documents_at].view("<i8")  # [S]
        self.documents: np.ndarray = raw[documents_at:modes_at].view("<i8")  # [D]
        self.modes: np.ndarray | None = None  # [S], only in multimodal data
        if len(raw) > modes_at:
            self.modes = raw[modes_at:].view("i1")
        self._check_sequences(offsets_at)
        self._check_documents(documents_at)
        self.tokens: np.ndarray = (  # every token of the .bin, in file order
            np.memmap(self._bin, dtype=self.dtype, mode="r").view(np.ndarray)
            if self._bin_bytes
            else np.empty(0, dtype=self.dtype)
        )

    def _read_header(self) -> tuple[np.dtype, int, int]:
        size = self._idx.stat().st_size
        with open_regular(self._idx, follow_links=True) as stream:
            head = stream.read(HEADER.size)
        if not MAGIC.startswith(head[: len(MAGIC)]):
            raise _bad(
                self._idx, 0, f"magic {head[: len(MAGIC)]!r}", repr(MAGIC),
                "This is not a Megatron index: check the prefix.",
            )  # fmt: skip
        if len(head) < HEADER.size:
            raise _bad(self._idx, size, "end of file", f"a header of {HEADER.size} bytes", _REWRITE)
        _, version, code, num_sequences, document_entries = HEADER.unpack(head)
        if version != VERSION:
            raise _bad(self._idx, 9, f"version {version}", str(VERSION), _REWRITE)
        if code not in TOKEN_TYPES:
            raise _bad(
                self._idx, 17, f"token type {code}", f"one of {sorted(TOKEN_TYPES)}", _REWRITE
            )
        # Python integers: a corrupt count of 2^63 neither overflows nor allocates.
        expected = HEADER.size + 12 * num_sequences + 8 * document_entries
        if size not in (expected, expected + num_sequences):
            raise _bad(
                self._idx, 18, f"{num_sequences} sequences and {document_entries} document "
                f"entries in a file of {size} bytes", f"{expected} bytes", _REWRITE,
            )  # fmt: skip
        return TOKEN_TYPES[code], num_sequences, document_entries

    def _check_sequences(self, offsets_at: int) -> None:
        described = self._described_bytes()
        itemsize, previous_end = self.dtype.itemsize, 0
        # No file is as large as int64 counts, so that sums do not wrap around.
        checked = len(self.lengths) if described < 1 << 63 else 0
        for start in range(0, checked, _CHECKED_AT_ONCE):
            lengths = self.lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64)
            offsets = self.byte_offsets[start : start + _CHECKED_AT_ONCE].astype(np.int64)
            # Back to back: each sequence starts where the one before it ends.
            ends = np.cumsum(lengths) * itemsize + previous_end
            expected_offsets = ends - lengths * itemsize
            if not np.array_equal(offsets, expected_offsets):
                row = int(np.argmax(offsets != expected_offsets))
                raise _bad(
                    self._idx, offsets_at + 8 * (start + row),
                    f"sequence {start + row} starts at byte {offsets[row]} of the .bin",
                    f"{expected_offsets[row]}, where the sequence before it ends", _REWRITE,
                )  # fmt: skip
            previous_end = int(ends[-1])
        if described != self._bin_bytes:
            relation = (
                "truncated" if self._bin_bytes < described else ("that belongs to another index")
            )
            raise _bad(
                self._bin, min(self._bin_bytes, described),
                f"the file has {self._bin_bytes} bytes and is {relation}",
                f"the {described} bytes that {self._idx.name} describes", _REWRITE,
            )  # fmt: skip

    def _described_bytes(self) -> int:
        """Return the bytes of all sequences, as a Python integer. Raises ValueError."""
        tokens = 0
        for start in range(0, len(self.lengths), _CHECKED_AT_ONCE):
            lengths = self.lengths[start : start + _CHECKED_AT_ONCE]
            if lengths.min() < 0:
                row = start + int(np.argmax(lengths < 0))
                raise _bad(
                    self._idx, HEADER.size + 4 * row,
                    f"sequence {row} has {self.lengths[row]} tokens", "0 or more", _REWRITE,
                )  # fmt: skip
            tokens += int(lengths.sum(dtype=np.int64))
        return tokens * self.dtype.itemsize

    def _check_documents(self, documents_at: int) -> None:
        documents, num_sequences = self.documents, len(self.lengths)
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != num_sequences:
            ends = [int(documents[0]), int(documents[-1])] if len(documents) else "nothing"
            raise _bad(
                self._idx, documents_at, f"the document list starts and ends with {ends}",
                f"[0, {num_sequences}]", _REWRITE,
            )  # fmt: skip
        for start in range(0, len(documents) - 1, _CHECKED_AT_ONCE):
            block = documents[start : start + _CHECKED_AT_ONCE + 1]
            decreases = block[1:] < block[:-1]  # a difference could wrap around in int64
            if decreases.any():
                row = start + int(np.argmax(decreases)) + 1
                raise _bad(
                    self._idx, documents_at + 8 * row,
                    f"document {row} starts at sequence {documents[row]}, before the "
                    "preceding document", "an ascending list", _REWRITE,
                )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Return the number of documents (each is one or more sequences)."""
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return len(self.tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the index, the size of the tokens and their first and last 64 KiB.

        Two data sets with one fingerprint give the same samples: it names index caches and lets a
        resumed run refuse other data. Reading all tokens would take minutes on a large corpus.
        """
        digest = hashlib.sha256(str(self._bin_bytes).encode())
        with open_regular(self._idx, follow_links=True) as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
        with open_regular(self._bin, follow_links=True) as stream:
            digest.update(stream.read(_FINGERPRINT_END_BYTES))
            stream.seek(max(0, self._bin_bytes - _FINGERPRINT_END_BYTES))
            digest.update(stream.read())
        return digest.hexdigest()

    def get(self, index: int, offset: int = 0, *, length: int | None = None) -> np.ndarray:
        """Return tokens of one sequence.

        Args:
            index: sequence number, 0 <= index < len(self).
            offset: first token to return, counted from the sequence's start.
            length: number of tokens; None means up to the sequence's end.

        Returns:
            A read-only view of the mapped file, [length], in the file's token type.

        Raises:
            IndexError: there is no such sequence, or it has no such tokens.
        """
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"sequence {index} of {self.prefix}: it has {len(self.lengths)}")
        available = int(self.lengths[index])
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise IndexError(
                f"tokens [{offset}, {offset + count}) of sequence {index} of {self.prefix}: "
                f"it has {available}"
            )
        start = int(self.byte_offsets[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + count]

    def locate(self, position: int) -> tuple[int, int, int]:
        """Return where a token of the `.bin` belongs, for error messages.

        Args:
            position: token number from the start of the file.

        Returns:
            (document, sequence, token number within the sequence).
        """
        byte = position * self.dtype.itemsize
        sequence = int(np.searchsorted(self.byte_offsets, byte, side="right")) - 1
        document = int(np.searchsorted(self.documents, sequence, side="right")) - 1
        start = int(self.byte_offsets[sequence]) // self.dtype.itemsize
        return document, sequence, position - start


# A block of int64 tokens, checked, converted and written while it is in the cache.
_CONVERTED_AT_ONCE = 1 << 16
_COPIED_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Written:
    """Progress of a writer: the part of a draft that a later writer can resume from.

    Args:
        tokens, sequences, documents: counts.
    """

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class IndexedDatasetWriter:
    """Write token sequences in a stream; neither the sequences nor their lengths stay in memory.

    Use it as a context manager. Leaving the block publishes `<prefix>.bin`, then `<prefix>.idx`;
    an exception in the block leaves nothing behind and an older pair untouched.

    A long run that must survive a kill passes a name as `draft`: the files of a named draft have
    fixed names. `commit` flushes them to the disk. After a kill, a writer with the same draft and
    with `written`, the return value of the last `commit`, resumes from there.

    Args:
        prefix: path without `.bin` or `.idx`; its folder must exist.
        dtype: token type, one of TOKEN_TYPES (see `token_type_for`).
        draft: part of the names of unfinished files; None means one that no other writer uses.
        written: progress of an earlier writer of this draft, from `commit`; None starts anew.

    Raises:
        ValueError: the format has no such token type, or the draft holds less than `written`.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type,
        *,
        draft: str | None = None,
        written: Written | None = None,
    ) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        codes = [
            code for code, dtype_of_code in TOKEN_TYPES.items() if dtype_of_code == self._dtype
        ]
        if not codes:
            names = ", ".join(str(dtype_of_code) for dtype_of_code in TOKEN_TYPES.values())
            raise ValueError(
                f"token type {np.dtype(dtype)} cannot be stored; choose one of {names}"
            )
        self._code = codes[0]
        self._prefix = prefix
        self._draft = secrets.token_hex(6) if draft is None else draft
        paths = _draft_paths(prefix, self._draft)
        progress = written or Written()
        self.num_sequences = progress.sequences
        self.num_documents = progress.documents
        self.num_tokens = progress.tokens
        # Lengths and documents go to separate files, because the index stores each as one array.
        self._stream = _open_draft(paths.tokens, written, progress.tokens * self._dtype.itemsize)
        self._lengths = _open_draft(paths.lengths, written, progress.sequences * 4)
        self._documents = _open_draft(paths.documents, written, progress.documents * 8)
        self._paths = paths

    @property
    def dtype(self) -> np.dtype:
        """Return the token type, as the file stores it."""
        return self._dtype

    def __enter__(self) -> IndexedDatasetWriter:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Publish the pair, or remove every trace of it after an exception."""
        if kind is None:
            self.close()
        else:
            self.abort()

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] = ()) -> None:
        """Append one document.

        Args:
            tokens: token ids of all its sequences, [t].
            lengths: tokens of each sequence, summing to t; empty means one sequence.

        Raises:
            ValueError: see `add_documents`.
        """
        tokens = np.asarray(tokens)
        self.add_documents(
            tokens, np.asarray(lengths or [len(tokens)]), sequences=[len(lengths) or 1]
        )

    def add_documents(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        *,
        sequences: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: token ids of all sequences back to back, [t], any integer type.
            lengths: tokens of each sequence, [n], summing to t.
            sequences: sequences of each document, summing to n; None means one each.

        Raises:
            ValueError: the sums disagree, a length does not fit int32, or a token does not fit
                the file's type. Nothing is written then.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        sequences_per_document = (
            np.ones(len(lengths), dtype=np.int64)
            if sequences is None
            else np.asarray(sequences, dtype=np.int64)
        )
        if int(lengths.sum()) != len(tokens) or int(sequences_per_document.sum()) != len(lengths):
            raise ValueError(
                f"{len(tokens)} tokens, sequence lengths summing to {int(lengths.sum())}, "
                f"{len(lengths)} sequences, documents summing to "
                f"{int(sequences_per_document.sum())}: the sums must agree"
            )
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() < 1 << 31:
            raise ValueError(
                f"sequence lengths from {lengths.min()} to {lengths.max()}: each must be between "
                "0 and 2147483647 tokens; split the document"
            )
        self._append(np.asarray(tokens))
        self._lengths.write(lengths.astype("<i4").tobytes())
        ends = self.num_sequences + np.cumsum(sequences_per_document)
        self._documents.write(ends.astype("<i8").tobytes())
        self.num_sequences += len(lengths)
        self.num_documents += len(sequences_per_document)
        self.num_tokens += len(tokens)

    def _append(self, tokens: np.ndarray) -> None:
        """Write tokens in the file's type. Raises ValueError for a token that does not fit it."""
        begin = self._stream.tell()
        for start in range(0, len(tokens), _CONVERTED_AT_ONCE):
            block = tokens[start : start + _CONVERTED_AT_ONCE]
            if block.dtype != self._dtype and self._dtype.kind in "iu":
                limits = np.iinfo(self._dtype)
                low, high = int(block.min()), int(block.max())
                if low < limits.min or high > limits.max:
                    self._stream.seek(begin)
                    self._stream.truncate()
                    raise ValueError(
                        f"token ids from {low} to {high} do not fit {self._dtype} "
                        f"({limits.min} to {limits.max}); choose a wider token type"
                    )
            stored = np.ascontiguousarray(block, dtype=self._dtype)
            self._stream.write(stored.data.cast("B"))

    def commit(self) -> Written:
        """Flush all added documents to the disk, so that a later writer can resume the draft here.

        Returns:
            The progress to pass to a later writer of this draft as `written`.
        """
        for stream in (self._stream, self._lengths, self._documents):
            stream.flush()
            os.fsync(stream.fileno())
        return Written(
            tokens=self.num_tokens, sequences=self.num_sequences, documents=self.num_documents
        )

    def prepare(self) -> None:
        """Flush both files to the disk under temporary names, so that only renames remain.

        A full disk raises here, before anything changes. Nothing can be added afterwards.
        """
        if self._stream.closed:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.keep()
        with open_to_write(self._paths.index, "w") as stream:
            self._write_index(stream)
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Flush both files to the disk and give them their names."""
        try:
            self.prepare()
            publish_draft(self._prefix, self._draft)
        except BaseException:
            self.abort()
            raise

    def _write_index(self, stream: BinaryIO) -> None:
        stream.write(
            HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1)
        )
        with open_regular(self._paths.lengths) as lengths:
            shutil.copyfileobj(lengths, stream, _COPIED_AT_ONCE)
            lengths.seek(0)
            end = 0
            while block := lengths.read(_COPIED_AT_ONCE):
                sizes = np.frombuffer(block, "<i4").astype(np.int64) * self._dtype.itemsize
                ends = end + np.cumsum(sizes)
                stream.write((ends - sizes).astype("<i8").tobytes())
                end = int(ends[-1])
        stream.write(np.zeros(1, dtype="<i8").tobytes())
        with open_regular(self._paths.documents) as documents:
            shutil.copyfileobj(documents, stream, _COPIED_AT_ONCE)

    def keep(self) -> None:
        """Close the files and leave them as a draft that can be resumed from its last `commit`."""
        for stream in (self._stream, self._lengths, self._documents):
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                stream.close()

    def abort(self) -> None:
        """Drop what was written; the target files are left as they were."""
        self.keep()
        drop_draft(self._prefix, self._draft)


@dataclass(frozen=True, kw_only=True)
class _DraftPaths:
    """The unfinished files of a data set."""

    tokens: Path
    lengths: Path
    documents: Path
    index: Path


def _draft_paths(prefix: str | Path, draft: str) -> _DraftPaths:
    return _DraftPaths(
        tokens=Path(f"{bin_path(prefix)}.{draft}.tmp"),
        lengths=Path(f"{idx_path(prefix)}.lengths.{draft}.tmp"),
        documents=Path(f"{idx_path(prefix)}.documents.{draft}.tmp"),
        index=Path(f"{idx_path(prefix)}.{draft}.tmp"),
    )


def _open_draft(path: Path, written: Written | None, size: int) -> BinaryIO:
    """Open a draft's file at its end, truncated to `size` bytes; a new one without `written`."""
    if written is None:
        return open_to_write(path, "w")
    file_bytes = path.stat().st_size if path.exists() else -1
    if file_bytes < size:
        raise ValueError(f"{path} is missing or shorter than the {size} bytes that were written")
    stream = open_to_write(path, "r+")
    stream.truncate(size)
    stream.seek(size)
    return stream


def publish_draft(prefix: str | Path, draft: str) -> None:
    """Give the prepared files of a draft their names; may be repeated after a kill.

    The index of an older pair is removed first and the new index is published last, so an index
    never describes the tokens of the other pair.

    Args:
        prefix: prefix of the data set.
        draft: name of a draft whose writer has called `prepare`.
    """
    paths = _draft_paths(prefix, draft)
    if paths.tokens.exists():
        idx = idx_path(prefix)
        if idx.exists():
            idx.unlink()
            sync_folder(idx.parent)
        publish(paths.tokens, bin_path(prefix))
    if paths.index.exists():
        publish(paths.index, idx_path(prefix))
    drop_draft(prefix, draft)


def shuffle_draft(
    prefix: str | Path, dtype: np.dtype | type, *, draft: str, into: str, seed: int
) -> None:
    """Prepare a second draft with the documents of a committed one in a random order.

    The order depends on `seed` and the number of documents alone (NumPy's RandomState, whose
    streams never change), so data sets of the same documents stay aligned.

    Args:
        prefix: prefix of the data set.
        dtype: token type of the draft.
        draft: name of a draft whose writer has called `commit`, with one sequence per document.
        into: name of the draft to write; an existing one is overwritten.
        seed: seed of the order, below 2**32.
    """
    paths = _draft_paths(prefix, draft)
    with open_regular(paths.lengths) as stream:
        lengths = np.frombuffer(stream.read(), "<i4")
    ends = np.cumsum(lengths, dtype=np.int64)
    order = np.random.RandomState(seed).permutation(len(lengths))
    with open_regular(paths.tokens) as source:
        writer = IndexedDatasetWriter(prefix, dtype, draft=into)
        try:
            itemsize = np.dtype(dtype).itemsize
            for document in order.tolist():
                length = int(lengths[document])
                source.seek((int(ends[document]) - length) * itemsize)
                tokens = np.frombuffer(source.read(length * itemsize), writer.dtype)
                writer.add_documents(tokens, lengths[document : document + 1])
            writer.prepare()
        except BaseException:
            writer.abort()
            raise


def drop_draft(prefix: str | Path, draft: str) -> None:
    """Remove the remaining files of a draft.

    Args:
        prefix: prefix of the data set.
        draft: name of the draft.
    """
    for path in vars(_draft_paths(prefix, draft)).values():
        path.unlink(missing_ok=True)
