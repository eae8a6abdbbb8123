# SPDX-License-Identifier: Apache-2.0
"""Text of a growing list of tokens, in pieces that never split a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: What decoding puts in place of bytes that are no whole character (yet).
REPLACEMENT = "�"


class TextStream:
    """Turn tokens, as they come, into pieces of text whose concatenation is the whole text.

    A byte-level token may end in the middle of a UTF-8 character; its text is held back until the
    character is whole or the stream is finished.

    Args:
        detokenize: the tokenizer's function from token ids to text.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._detokenize = detokenize
        self._shown_chars = 0

    def push(self, tokens: Sequence[int], *, finished: bool = False) -> str:
        """Return the text that `tokens` (all so far) add to what was returned before."""
        text = self._detokenize(tokens)
        if not finished:
            # A character has at most four bytes; whatever was invalid before them stays so.
            text = text[: len(text) - _incomplete(text)]
        piece = text[self._shown_chars :]
        self._shown_chars += len(piece)
        return piece


def _incomplete(text: str) -> int:
    """Return how many replacement characters at the end may still become part of a character."""
    return min(3, len(text) - len(text.rstrip(REPLACEMENT)))
