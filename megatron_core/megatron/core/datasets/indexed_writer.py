# SPDX-License-Identifier: Apache-2.0
"""Writer of Megatron's `.bin/.idx` pair: streaming, checked, and visible only when complete."""

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megatron.core.datasets.atomic_file import publish, sync_folder
from megatron.core.datasets.indexed_dataset import (
    HEADER,
    MAGIC,
    TOKEN_TYPES,
    VERSION,
    bin_path,
    idx_path,
)
from megatron.core.untrusted_files import open_regular, open_to_write

# A block of int64 tokens, checked, converted and written while it is in the cache.
_CONVERTED_AT_ONCE = 1 << 16
_COPIED_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Written:
    """How much of a data set is written; what a draft can be taken up from.

    Args:
        tokens, sequences, documents: counts.
    """

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class IndexedDatasetWriter:
    """Write token sequences as they come; memory holds none of them, nor their lengths.

    Use it as a context manager. Leaving the block publishes `<prefix>.bin`, then `<prefix>.idx`;
    an exception in the block leaves nothing behind and an older pair untouched.

    Long work that must survive a kill names its `draft`: the files of a draft have fixed names.
    `commit` brings them to the disk; after a kill, a writer with the same draft and what `commit`
    returned takes up from there.

    Args:
        prefix: path without `.bin` or `.idx`; its folder must exist.
        dtype: token type, one of TOKEN_TYPES (see `token_type_for`).
        draft: part of the names of unfinished files; None means one that no other writer uses.
        written: how much of an earlier writer's draft to keep; None starts anew.

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
        codes = [code for code, known in TOKEN_TYPES.items() if known == self._dtype]
        if not codes:
            names = ", ".join(str(known) for known in TOKEN_TYPES.values())
            raise ValueError(
                f"token type {np.dtype(dtype)} cannot be stored; choose one of {names}"
            )
        self._code = codes[0]
        self._prefix = prefix
        self._draft = secrets.token_hex(6) if draft is None else draft
        paths = _draft_paths(prefix, self._draft)
        kept = written or Written()
        self.num_sequences = kept.sequences
        self.num_documents = kept.documents
        self.num_tokens = kept.tokens
        # The lengths and documents wait in files of their own: an index has them in one piece each.
        self._stream = _open_draft(paths.tokens, written, kept.tokens * self._dtype.itemsize)
        self._lengths = _open_draft(paths.lengths, written, kept.sequences * 4)
        self._documents = _open_draft(paths.documents, written, kept.documents * 8)
        self._paths = paths

    @property
    def dtype(self) -> np.dtype:
        """Return the token type, as the file stores it."""
        return self._dtype

    def __enter__(self) -> "IndexedDatasetWriter":
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
        per_document = (
            np.ones(len(lengths), dtype=np.int64)
            if sequences is None
            else np.asarray(sequences, dtype=np.int64)
        )
        if int(lengths.sum()) != len(tokens) or int(per_document.sum()) != len(lengths):
            raise ValueError(
                f"{len(tokens)} tokens, sequence lengths summing to {int(lengths.sum())}, "
                f"{len(lengths)} sequences, documents summing to {int(per_document.sum())}: "
                "the sums must agree"
            )
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() < 1 << 31:
            raise ValueError(
                f"sequence lengths from {lengths.min()} to {lengths.max()}: each must be between "
                "0 and 2147483647 tokens; split the document"
            )
        self._append(np.asarray(tokens))
        self._lengths.write(lengths.astype("<i4").tobytes())
        ends = self.num_sequences + np.cumsum(per_document)
        self._documents.write(ends.astype("<i8").tobytes())
        self.num_sequences += len(lengths)
        self.num_documents += len(per_document)
        self.num_tokens += len(tokens)

    def _append(self, tokens: np.ndarray) -> None:
        """Write tokens in the file's type; one that would wrap around is refused."""
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
            self._stream.write(memoryview(stored).cast("B"))

    def commit(self) -> Written:
        """Bring everything so far to the disk, so that a draft can be taken up from here.

        Returns:
            What a later writer of this draft is given.
        """
        for stream in (self._stream, self._lengths, self._documents):
            stream.flush()
            os.fsync(stream.fileno())
        return Written(
            tokens=self.num_tokens, sequences=self.num_sequences, documents=self.num_documents
        )

    def prepare(self) -> None:
        """Bring both files to the disk under temporary names: only renames remain to be done.

        A disk that is full says so here, before anything changes. Nothing can be added afterwards.
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
        """Close the files and leave them as a draft, to be taken up from its last `commit`."""
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
    """Open an unfinished file for more, cut to what counts; a new one without `written`."""
    if written is None:
        return open_to_write(path, "w")
    found = path.stat().st_size if path.exists() else -1
    if found < size:
        raise ValueError(f"{path} is gone or shorter than the {size} bytes that were written")
    stream = open_to_write(path, "r+")
    stream.truncate(size)
    stream.seek(size)
    return stream


def publish_draft(prefix: str | Path, draft: str) -> None:
    """Give the prepared files of a draft their names; done again after a kill, it ends the same.

    An older pair loses its index first and gains the new one last, so at no moment does an index
    describe the tokens of the other pair.

    Args:
        prefix: of the data set.
        draft: of a writer that has been through `prepare`.
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
        prefix: of the data set.
        dtype: token type of the draft.
        draft: of a writer that has been through `commit`, with one sequence in each document.
        into: name of the draft to write; one that exists is written anew.
        seed: of the order, below 2**32.
    """
    paths = _draft_paths(prefix, draft)
    with open_regular(paths.lengths) as stream:
        lengths = np.frombuffer(stream.read(), "<i4")
    ends = np.cumsum(lengths, dtype=np.int64)
    order = np.random.RandomState(seed).permutation(len(lengths))
    with open_regular(paths.tokens) as source:
        writer = IndexedDatasetWriter(prefix, dtype, draft=into)
        try:
            item = np.dtype(dtype).itemsize
            for document in order.tolist():
                length = int(lengths[document])
                source.seek((int(ends[document]) - length) * item)
                tokens = np.frombuffer(source.read(length * item), writer.dtype)
                writer.add_documents(tokens, lengths[document : document + 1])
            writer.prepare()
        except BaseException:
            writer.abort()
            raise


def drop_draft(prefix: str | Path, draft: str) -> None:
    """Remove what is left of a draft.

    Args:
        prefix: of the data set.
        draft: of a writer.
    """
    for path in vars(_draft_paths(prefix, draft)).values():
        path.unlink(missing_ok=True)
