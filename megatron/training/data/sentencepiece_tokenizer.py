# SPDX-License-Identifier: Apache-2.0
"""SentencePiece `.model` files; the one module that imports the library `sentencepiece`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.untrusted_files import MAX_TOKENIZER_BYTES, read_regular
from megatron.training.data.tokenizers import SpecialTokens, config_field


class SentencePieceTokenizer:
    """A SentencePiece model, run by the library `sentencepiece`.

    Most models normalise text: runs of blanks may come back as one. A text gets no special tokens,
    unless a `tokenizer_config.json` beside the file asks for them (`add_bos_token`,
    `add_eos_token`), as in `transformers`.

    Args:
        path: a `.model` file, or a folder that holds `tokenizer.model`.
        add_special_tokens: False leaves them out of every text.

    Raises:
        ValueError: the library is not installed, there is no such file, or it is none.
    """

    def __init__(self, path: str | Path, *, add_special_tokens: bool = True) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise ValueError(
                f"tokenizer {path}: SentencePiece models need sentencepiece: pip install "
                "sentencepiece"
            ) from None
        path = Path(path)
        named = not os.path.isdir(path)
        path = path if named else path / "tokenizer.model"
        try:
            content = read_regular(path, MAX_TOKENIZER_BYTES, follow_links=named)
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
        self._special = self._asked_for(path) if add_special_tokens else SpecialTokens()

    def _asked_for(self, path: Path) -> SpecialTokens:
        """Return the special tokens that the file beside the model asks for."""
        beside = path.with_name("tokenizer_config.json")

        def found(name: str, number: int) -> tuple[int, ...]:
            return (number,) if number >= 0 and config_field(beside, name) is True else ()

        return SpecialTokens(
            before=found("add_bos_token", self._processor.bos_id()),
            after=found("add_eos_token", self._processor.eos_id()),
        )

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

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return what is added around a text."""
        return self._special

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        special = self._special if add_special_tokens else SpecialTokens()
        return [*special.before, *self._processor.encode(text), *special.after]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special pieces and ids beyond the last are left out."""
        return self._processor.decode([number for number in ids if number < self._size])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, with special tokens."""
        before, after = self._special.before, self._special.after
        found = self._processor.encode(list(texts), num_threads=1)
        return [[*before, *ids, *after] for ids in found] if self._special else found

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, with special tokens, each [t]."""
        try:
            found = self._processor.encode(list(texts), out_type="numpy", num_threads=1)
        except RuntimeError:  # releases before 0.2.3 may not know this type
            return [np.array(ids, dtype=np.int32) for ids in self.encode_batch(texts)]
        if not self._special:
            return found
        before, after = (np.array(ids, np.int32) for ids in self._special.to_json().values())
        return [np.concatenate([before, ids, after], dtype=np.int32) for ids in found]
