# SPDX-License-Identifier: Apache-2.0
"""SentencePiece `.model` files; the one module that imports the library `sentencepiece`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class SentencePieceTokenizer:
    """A SentencePiece model, run by the library `sentencepiece`.

    Most models normalise text: runs of blanks may come back as one.

    Args:
        path: a `.model` file, or a folder that holds `tokenizer.model`.

    Raises:
        ValueError: the library is not installed, there is no such file, or it is none.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise ValueError(
                f"tokenizer {path}: SentencePiece models need sentencepiece: pip install "
                "sentencepiece"
            ) from None
        path = Path(path)
        path = path / "tokenizer.model" if path.is_dir() else path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"tokenizer {path}: {error.strerror}; give --tokenizer-model a SentencePiece .model"
            ) from None
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
            self._size: int = self._processor.get_piece_size()
        except RuntimeError:
            self._size = 0
        if self._size == 0:
            raise ValueError(f"tokenizer {path} is no SentencePiece model")
        self._fingerprint = hashlib.sha256(content).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Return the number of pieces."""
        return self._size

    @property
    def eod(self) -> int | None:
        """Return the id of the model's end-of-sentence piece, if it has one."""
        found: int = self._processor.eos_id()
        return found if found >= 0 else None

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the file."""
        return self._fingerprint

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without pieces for its beginning and end."""
        return self._processor.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special pieces and ids beyond the last are left out."""
        return self._processor.decode([number for number in ids if number < self._size])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""
        return self._processor.encode(list(texts), num_threads=1)

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, each [t]."""
        try:
            return self._processor.encode(list(texts), out_type="numpy", num_threads=1)
        except RuntimeError:  # releases before 0.2.3 may not know this type
            return [np.array(ids, dtype=np.int32) for ids in self.encode_batch(texts)]
