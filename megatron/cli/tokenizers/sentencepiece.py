# SPDX-License-Identifier: Apache-2.0
"""SentencePiece models.

Only this module imports the library `sentencepiece`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli.tokenizers.base import SpecialTokens, config_field
from megatron.cli.tokenizers.tiktoken import is_tiktoken
from megatron.core.untrusted_files import MAX_TOKENIZER_BYTES, read_regular


class SentencePieceTokenizer:
    """A SentencePiece model, run by the library `sentencepiece`.

    Most models normalise text: a run of blanks may be decoded as one blank. Special tokens are
    added to a text only if a `tokenizer_config.json` in the same folder enables them
    (`add_bos_token`, `add_eos_token`), as in `transformers`.

    Args:
        path: a `.model` file, or a folder that contains a file tokenizer.model.
        add_special_tokens: False adds no special tokens to texts.

    Raises:
        ValueError: the library is not installed, or the file does not exist or is invalid.
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
        is_file_path = not os.path.isdir(path)
        path = path if is_file_path else path / "tokenizer.model"
        try:
            content = read_regular(path, MAX_TOKENIZER_BYTES, follow_links=is_file_path)
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
            fix = ": --tokenizer-type tiktoken reads it" if is_tiktoken(content) else ""
            raise ValueError(f"tokenizer {path} is not a SentencePiece model{fix}")
        self._fingerprint = hashlib.sha256(content).hexdigest()
        self._special = self._special_tokens_of(path) if add_special_tokens else SpecialTokens()

    def _special_tokens_of(self, path: Path) -> SpecialTokens:
        """Return the special tokens that `tokenizer_config.json` enables."""
        config_path = path.with_name("tokenizer_config.json")

        def ids_if_enabled(name: str, number: int) -> tuple[int, ...]:
            return (number,) if number >= 0 and config_field(config_path, name) is True else ()

        return SpecialTokens(
            before=ids_if_enabled("add_bos_token", self._processor.bos_id()),
            after=ids_if_enabled("add_eos_token", self._processor.eos_id()),
        )

    @property
    def vocab_size(self) -> int:
        """Return the number of pieces."""
        return self._size

    @property
    def eod(self) -> int | None:
        """Return the id of the model's end-of-sentence piece, if it has one."""
        eos_id: int = self._processor.eos_id()
        return eos_id if eos_id >= 0 else None

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the file."""
        return self._fingerprint

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens that are added around a text."""
        return self._special

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        special = self._special if add_special_tokens else SpecialTokens()
        return [*special.before, *self._processor.encode(text), *special.after]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; special pieces and ids beyond the last are left out."""
        return self._processor.decode([number for number in ids if number < self._size])

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each piece within a text."""
        return [self.bytes_of(number) for number in range(self._size)]

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a piece within a text."""
        name, processor = self.name_of(token), self._processor
        if name is None:
            return None
        if processor.is_byte(token):
            return bytes([int(name[3:-1], 16)])  # <0x0A>
        no_text = (processor.is_control, processor.is_unknown, processor.is_unused)
        if any(is_kind(token) for is_kind in no_text):
            return None
        return name.replace("\u2581", " ").encode()

    def name_of(self, token: int) -> str | None:
        """Return the name of a piece in the model."""
        return self._processor.id_to_piece(token) if token < self._size else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, with special tokens."""
        before, after = self._special.before, self._special.after
        ids_by_text = self._processor.encode(list(texts), num_threads=1)
        return [[*before, *ids, *after] for ids in ids_by_text] if self._special else ids_by_text

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, with special tokens, each [t]."""
        try:
            ids_by_text = self._processor.encode(list(texts), out_type="numpy", num_threads=1)
        except RuntimeError:  # releases before 0.2.3 may not know this type
            return [np.array(ids, dtype=np.int32) for ids in self.encode_batch(texts)]
        if not self._special:
            return ids_by_text
        before, after = (np.array(ids, np.int32) for ids in self._special.to_json().values())
        return [np.concatenate([before, ids, after], dtype=np.int32) for ids in ids_by_text]
