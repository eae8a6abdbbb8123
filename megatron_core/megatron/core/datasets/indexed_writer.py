# SPDX-License-Identifier: Apache-2.0
"""Writer of Megatron's `.bin/.idx` pair: streaming, checked, and visible only when complete."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megatron.core.datasets.atomic_file import (
    publish,
    sync_folder,
    temporary_path,
)
from megatron.core.datasets.indexed_dataset import (
    HEADER,
    MAGIC,
    TOKEN_TYPES,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
)

# A block of int64 tokens, checked, converted and written while it is in the cache.
_CONVERTED_AT_ONCE = 1 << 16


class IndexedDatasetWriter:
    """Write token sequences as they come; memory holds lengths only, never tokens.

    Use it as a context manager. Leaving the block publishes `<prefix>.bin`, then `<prefix>.idx`;
    an exception in the block leaves nothing behind and an older pair untouched.

    Args:
        prefix: path without `.bin` or `.idx`; its folder must exist.
        dtype: token type, one of TOKEN_TYPES (see `token_type_for`).

    Raises:
        ValueError: the format has no such token type.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in TOKEN_TYPES.items() if known == self._dtype]
        if not codes:
            names = ", ".join(str(known) for known in TOKEN_TYPES.values())
            raise ValueError(
                f"token type {np.dtype(dtype)} cannot be stored; choose one of {names}"
            )
        self._code = codes[0]
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        self._lengths: list[np.ndarray] = []
        self._documents: list[np.ndarray] = [np.zeros(1, dtype="<i8")]
        self.num_sequences = 0
        self.num_tokens = 0
        self._temporary = temporary_path(self._bin)
        self._temporary_index = temporary_path(self._idx)
        self._stream = open(self._temporary, "xb")  # noqa: SIM115 - closed by close() or abort()

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

    @property
    def num_documents(self) -> int:
        """Return the number of documents written so far."""
        return sum(len(block) for block in self._documents) - 1

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
        self._lengths.append(lengths.astype("<i4"))
        self._documents.append(self.num_sequences + np.cumsum(per_document))
        self.num_sequences += len(lengths)
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

    def append_dataset(self, prefix: str | Path) -> None:
        """Append every document of another data set.

        Args:
            prefix: an existing pair of the same token type.

        Raises:
            ValueError: the token types differ, or the pair is damaged.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self._dtype:
            raise ValueError(
                f"{prefix} stores {other.dtype}, this data set {self._dtype}; merge data sets of "
                "one tokenizer only"
            )
        with open(bin_path(prefix), "rb") as source:
            shutil.copyfileobj(source, self._stream, 1 << 22)
        self._lengths.append(np.array(other.lengths))
        self._documents.append(other.documents[1:] + self.num_sequences)
        self.num_sequences += len(other)
        self.num_tokens += other.num_tokens

    def prepare(self) -> None:
        """Bring both files to the disk under temporary names: only renames remain to be done.

        A disk that is full says so here, before anything changes. Nothing can be added afterwards.
        """
        if self._stream.closed:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        with open(self._temporary_index, "xb") as stream:
            self._write_index(stream)
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Flush both files to the disk and give them their names.

        An older pair loses its index first and gains the new one last, so at no moment does an
        index describe the tokens of the other pair.
        """
        try:
            self.prepare()
            if self._idx.exists():
                self._idx.unlink()
                sync_folder(self._idx.parent)
            publish(self._temporary, self._bin)
            publish(self._temporary_index, self._idx)
        except BaseException:
            self.abort()
            raise

    def _write_index(self, stream: BinaryIO) -> None:
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, "<i4")
        documents = np.concatenate(self._documents).astype("<i8")
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        offsets = ends - lengths.astype(np.int64) * self._dtype.itemsize
        stream.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
        for array in (lengths, offsets.astype("<i8"), documents):
            stream.write(array.tobytes())

    def abort(self) -> None:
        """Drop what was written; the target files are left as they were."""
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self._stream.close()
        self._temporary.unlink(missing_ok=True)
        self._temporary_index.unlink(missing_ok=True)


def merge_datasets(prefixes: Sequence[str | Path], output_prefix: str | Path) -> None:
    """Concatenate data sets into one, documents in the order given.

    Args:
        prefixes: existing pairs of one token type.
        output_prefix: the new pair; must not be one of `prefixes`.

    Raises:
        ValueError: no prefixes, differing token types, or the output is one of the inputs.
    """
    if not prefixes:
        raise ValueError("nothing to merge: name at least one data set")
    if Path(output_prefix).resolve() in {Path(prefix).resolve() for prefix in prefixes}:
        raise ValueError(f"{output_prefix} is both input and output; choose another output prefix")
    with IndexedDatasetWriter(output_prefix, IndexedDataset(prefixes[0]).dtype) as writer:
        for prefix in prefixes:
            writer.append_dataset(prefix)
