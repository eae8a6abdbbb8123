# SPDX-License-Identifier: Apache-2.0
"""Text of growing lists of tokens: pieces that never split a character, and prompts in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TextIO

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


class Display:
    """Print prompts and their continuations in order, each as soon as its turn has come.

    The first unfinished prompt of a batch is printed token by token; the others follow with what
    they have by then.

    Args:
        texts: the prompts.
        detokenizers: for each prompt, the function from the token ids that follow it to text.
        out: where to print.
    """

    def __init__(
        self,
        texts: Sequence[str],
        detokenizers: Sequence[Callable[[Sequence[int]], str]],
        out: TextIO,
    ) -> None:
        self._texts = texts
        self._detokenizers = detokenizers
        self._out = out
        self._current = 0
        self._stream: TextStream | None = None
        self._latest: dict[int, tuple[Sequence[int], bool]] = {}

    def update(self, index: int, tokens: Sequence[int], *, finished: bool) -> None:
        """Take the generated tokens so far of prompt `index` and print what can be printed."""
        self._latest[index] = (tokens, finished)
        if index > self._current:
            return
        while self._current in self._latest:
            tokens, finished = self._latest[self._current]
            if self._stream is None:
                self._begin()
                self._stream = TextStream(self._detokenizers[self._current])
            print(self._stream.push(tokens, finished=finished), end="", file=self._out, flush=True)
            if not finished:
                return
            print(file=self._out, flush=True)
            del self._latest[self._current]
            self._current += 1
            self._stream = None

    def _begin(self) -> None:
        if len(self._texts) > 1:
            print(f"--- prompt {self._current + 1} of {len(self._texts)}", file=self._out)
        print(self._texts[self._current], end="", file=self._out)
