# SPDX-License-Identifier: Apache-2.0
"""Streaming detokenization: decode generated tokens incrementally, up to a stop string.

Each token is decoded together with a few preceding tokens, so the 10,000th token costs as much as
the 10th. Decoding single tokens would be wrong: a byte-level token may be part of a character, and
SentencePiece drops the blank of the first word of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Decoders replace bytes that are not (yet) a complete character by this character.
REPLACEMENT = "�"

# A UTF-8 character has at most four bytes, so up to three replacements may still be completed.
_OPEN_CHARS = 3

# Number of prompt tokens decoded together with the first generated tokens.
_PROMPT_TOKENS = 16

# Number of complete tokens after which older tokens of the window are dropped.
_CONTEXT_TOKENS = 4

# Number of tokens without a complete character at their end after which tokens are dropped anyway.
_BROKEN_TOKENS = 16


def _trailing(text: str) -> int:
    """Return the number of replacement characters at the end of a text."""
    return len(text) - len(text.rstrip(REPLACEMENT))


class _Decoder:
    """Incremental decoder over a window of tokens.

    The first `_context` tokens of the window are context; their text ends with a complete
    character. The first `_whole` tokens also end with a complete character. `_emitted` is the
    prefix of the window's text that has been returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        window = list(context[-_PROMPT_TOKENS:])
        # The window must not start inside a character: a decoder that replaces a whole run of bytes
        # for one invalid byte would then never emit a character of the run.
        starts = (window[n:] for n in range(_OPEN_CHARS + 1))
        self._window = next((w for w in starts if not decode(w).startswith(REPLACEMENT)), window)
        self._emitted = decode(self._window)
        self._context = self._whole = len(self._window)

    def push(self, token: int) -> str:
        """Return the text that a token adds, without an incomplete last character."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._emitted):
            if text.endswith(REPLACEMENT) and len(self._window) - self._whole < _BROKEN_TOKENS:
                # A run of bytes, replaced as a whole until its last character is complete.
                return ""
            text = self._begin_after_whole()
        open_chars = _trailing(text)
        if len(self._window) - self._whole >= _BROKEN_TOKENS:
            # Older replacements can never become complete characters.
            open_chars = min(_OPEN_CHARS, open_chars)
        # The context's text may end with an incomplete character, which counts as emitted.
        settled = text[: max(len(self._emitted), len(text) - open_chars)]
        new_text = settled[len(self._emitted) :]
        self._emitted = settled
        if not open_chars:
            self._whole = len(self._window)
            if self._whole - self._context >= _CONTEXT_TOKENS:
                self._drop_context()
        elif len(self._window) - self._context >= 2 * _BROKEN_TOKENS:
            new_text += self._drop_broken(text)
        return new_text

    def flush(self) -> str:
        """Return the remaining text, including incomplete characters."""
        text = self._decode(self._window)
        if not text.startswith(self._emitted):
            text = self._begin_after_whole()
        new_text = text[len(self._emitted) :]
        self._emitted = text
        return new_text

    def _begin_after_whole(self) -> str:
        """Drop the tokens up to the last complete character; return the text of the others."""
        del self._window[: self._whole]
        self._context = self._whole = 0
        self._emitted = ""
        return self._decode(self._window)

    def _drop_context(self) -> None:
        """Make the newer tokens the context, or keep the old context if they have no text."""
        newer = self._decode(self._window[self._context :])
        # Blanks and special tokens may decode to nothing and cannot serve as context.
        if newer and self._emitted.endswith(newer):
            del self._window[: self._context]
            self._emitted = newer
        else:
            del self._window[self._context :]
            self._emitted = self._decode(self._window)
        self._context = self._whole = len(self._window)

    def _drop_broken(self, text: str) -> str:
        """Shorten a window whose recent tokens never end with a complete character."""
        context = self._window[: self._context]
        window = context + self._window[-_BROKEN_TOKENS:]
        shortened = self._decode(window)
        end = text[-2 * _OPEN_CHARS :]
        if shortened[len(self._decode(context)) :].endswith(end):
            # The window still has the last four bytes, so later tokens decode as before.
            self._window = window
            self._whole = self._context
            self._emitted = shortened[: len(shortened) - len(text) + len(self._emitted)]
            return ""
        # An incomplete character followed by special tokens can never become complete.
        new_text = text[len(self._emitted) :]
        self._emitted = text
        self._drop_context()
        return new_text


class TextStream:
    """Decode tokens incrementally into text deltas, up to the first stop string.

    The concatenated deltas equal `decode([*context, *tokens])` without the text of the context, for
    every split of the tokens among calls. A delta never ends inside a character: an incomplete
    character is withheld. Text that may be the beginning of a stop string is withheld as well.

    A decoder that replaces a whole run of bytes with an incomplete end (`ByteFallback` of the
    library `tokenizers`) may replace characters that have been returned already. These characters
    stay, and the bytes after them are decoded separately.

    Args:
        decode: maps token ids to text. It is called with a bounded number of tokens.
        context: tokens before the first new token, usually the prompt; only the last 16 are used.
        stop: strings that end the text. The stop string that is complete first ends it; among stop
            strings that end at the same character the longest wins. The stop string and the text
            after it are not returned.
        include_stop: return the stop string as well.
        min_tokens: stop strings in the text of the first `min_tokens` tokens do not end the text.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop is {stop!r}: use a list of non-empty strings")
        self._decoder = _Decoder(decode, context)
        self._stop, self._include_stop = tuple(stop), include_stop
        self._num_free_tokens = min_tokens
        self._withheld = ""
        self._ended = False
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that has ended the text, or None."""
        return self._stopped

    def push(self, new_tokens: Sequence[int], *, finished: bool = False) -> str:
        """Return the text delta of new tokens.

        Args:
            new_tokens: tokens after the tokens of earlier calls.
            finished: no tokens follow, so return withheld text as well. Later calls return "".
        """
        if self._ended:
            return ""
        deltas = []
        for token in new_tokens:
            new_text = self._decoder.push(token)
            # Text of these tokens is never withheld, as no stop string can begin in it.
            if self._num_free_tokens > 0:
                self._num_free_tokens -= 1
                deltas.append(new_text)
                continue
            deltas.append(self._until_stop(new_text))
            if self._ended:
                return "".join(deltas)
        if finished:
            deltas.append(self._until_stop(self._decoder.flush()))
            deltas.append(self._withheld)
            self._withheld = ""
            self._ended = True
        return "".join(deltas)

    def _until_stop(self, new_text: str) -> str:
        """Return the text before a stop string, without a possible beginning of a stop string."""
        if not new_text or not self._stop:
            return new_text
        text = self._withheld + new_text
        matches = [(start + len(s), -len(s), s) for s in self._stop if (start := text.find(s)) >= 0]
        if matches:
            # Ordered by end, then by descending length: the first complete, then the longest.
            end, _, self._stopped = min(matches)
            self._withheld = ""
            self._ended = True
            return text[: end if self._include_stop else end - len(self._stopped)]
        longest = max(map(len, self._stop)) - 1
        suffixes = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
        self._withheld = next((t for t in suffixes if any(s.startswith(t) for s in self._stop)), "")
        return text[: len(text) - len(self._withheld)]
