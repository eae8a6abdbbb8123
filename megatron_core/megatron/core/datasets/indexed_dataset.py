# SPDX-License-Identifier: Apache-2.0
"""Reader of Megatron's `.bin/.idx` pair: token sequences mapped into memory, checked at open.

`<prefix>.bin` holds the tokens of all sequences back to back, without a header. `<prefix>.idx`,
little endian, says how to cut it:

    offset        type        content
    0             9 bytes     b"MMIDIDX\\0\\0"
    9             uint64      version, 1
    17            uint8       token type (TOKEN_TYPES)
    18            uint64      S, the number of sequences
    26            uint64      D, the length of the document list (documents + 1)
    34            int32[S]    tokens of each sequence
    34 + 4S       int64[S]    byte offset of each sequence in the .bin
    34 + 12S      int64[D]    sequence at which each document starts; first 0, last S
    34 + 12S + 8D int8[S]     modes, only in multimodal data

Everything the index promises is checked against the two files when they are opened, so that a
truncated or foreign file is one line before training and never a crash or a wrong token in it.
"""

import hashlib
import os
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megatron.core.untrusted_files import open_regular

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
_FINGERPRINT_TAIL_BYTES = 1 << 16


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


def _bad(path: Path, offset: int, found: str, expected: str, mend: str) -> ValueError:
    return ValueError(f"{path}: at byte {offset}: {found}; expected {expected}. {mend}")


_REWRITE = "Write the data set again (python -m megatron.training.preprocess_data) or copy it anew."


class IndexedDataset:
    """Random access to the sequences of one `.bin/.idx` pair.

    Nothing is copied: all arrays are views of mapped files, shared by the processes of a node.

    Args:
        prefix: path without `.bin` or `.idx`.

    Raises:
        ValueError: a file is missing, truncated, foreign, or says something the other one does not
            hold; the message names the file, the byte, what was expected and how to mend it.
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
        itemsize, previous_end = self.dtype.itemsize, 0
        for start in range(0, len(self.lengths), _CHECKED_AT_ONCE):
            lengths = self.lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64)
            offsets = self.byte_offsets[start : start + _CHECKED_AT_ONCE].astype(np.int64)
            if lengths.min() < 0:
                row = start + int(np.argmax(lengths < 0))
                raise _bad(
                    self._idx, HEADER.size + 4 * row,
                    f"sequence {row} has {self.lengths[row]} tokens", "0 or more", _REWRITE,
                )  # fmt: skip
            # Back to back: each sequence starts where the one before it ends.
            ends = np.cumsum(lengths) * itemsize + previous_end
            wanted = ends - lengths * itemsize
            if not np.array_equal(offsets, wanted):
                row = int(np.argmax(offsets != wanted))
                raise _bad(
                    self._idx, offsets_at + 8 * (start + row),
                    f"sequence {start + row} starts at byte {offsets[row]} of the .bin",
                    f"{wanted[row]}, where the sequence before it ends", _REWRITE,
                )  # fmt: skip
            previous_end = int(ends[-1])
        if previous_end != self._bin_bytes:
            relation = "truncated" if self._bin_bytes < previous_end else "of another index"
            raise _bad(
                self._bin, min(self._bin_bytes, previous_end),
                f"the file has {self._bin_bytes} bytes and is {relation}",
                f"the {previous_end} bytes that {self._idx.name} describes", _REWRITE,
            )  # fmt: skip

    def _check_documents(self, documents_at: int) -> None:
        documents, num_sequences = self.documents, len(self.lengths)
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != num_sequences:
            ends = [int(documents[0]), int(documents[-1])] if len(documents) else "nothing"
            raise _bad(
                self._idx, documents_at, f"the document list starts and ends with {ends}",
                f"[0, {num_sequences}]", _REWRITE,
            )  # fmt: skip
        for start in range(0, len(documents) - 1, _CHECKED_AT_ONCE):
            steps = np.diff(documents[start : start + _CHECKED_AT_ONCE + 1])
            if steps.min() < 0:
                row = start + int(np.argmax(steps < 0)) + 1
                raise _bad(
                    self._idx, documents_at + 8 * row,
                    f"document {row} starts at sequence {documents[row]}, before the one ahead "
                    "of it", "a rising list", _REWRITE,
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
            digest.update(stream.read(_FINGERPRINT_TAIL_BYTES))
            stream.seek(max(0, self._bin_bytes - _FINGERPRINT_TAIL_BYTES))
            digest.update(stream.read())
        return digest.hexdigest()

    def get(self, index: int, offset: int = 0, *, length: int | None = None) -> np.ndarray:
        """Return tokens of one sequence.

        Args:
            index: sequence number, 0 <= index < len(self).
            offset: first token wanted, counted from the sequence's start.
            length: number of tokens; None means up to the sequence's end.

        Returns:
            A read-only view of the mapped file, [length], in the file's token type.

        Raises:
            IndexError: there is no such sequence, or it has no such tokens.
        """
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"sequence {index} of {self.prefix}: it holds {len(self.lengths)}")
        available = int(self.lengths[index])
        wanted = available - offset if length is None else length
        if offset < 0 or wanted < 0 or offset + wanted > available:
            raise IndexError(
                f"tokens [{offset}, {offset + wanted}) of sequence {index} of {self.prefix}: "
                f"it has {available}"
            )
        start = int(self.byte_offsets[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + wanted]

    def locate(self, position: int) -> tuple[int, int, int]:
        """Say where a token of the `.bin` belongs; used to name it in an error.

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
