# SPDX-License-Identifier: Apache-2.0
"""Turn generated tokens into text as they come, up to a stop string.

Each token is decoded together with a few tokens before it, never with all of them: the 10,000th
token costs what the 10th does. A token alone would not do. A byte-level token may be part of a
character, and SentencePiece drops the blank of a word that begins a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: What decoding puts in place of bytes that are no whole character (yet).
REPLACEMENT = "�"

# A UTF-8 character has at most four bytes: so many replacements may still become one.
_OPEN_CHARS = 3

# Tokens of the prompt that are decoded with the first generated tokens.
_PROMPT_TOKENS = 16

# Tokens that are decoded with the next ones; every so many tokens older ones are dropped.
_CONTEXT_TOKENS = 4

# Tokens without one whole character at their end, after which some of them are dropped too.
_BROKEN_TOKENS = 16


def _trailing(text: str) -> int:
    """Return the number of replacement characters that a text ends with."""
    return len(text) - len(text.rstrip(REPLACEMENT))


class _Decoder:
    """Decode token after token within a window.

    The window holds `_context` tokens whose text ends with a whole character, then newer ones. Of
    those the first `_whole - _context` end with a whole character too. `_shown` is the part of the
    window's text that was returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        window = list(context[-_PROMPT_TOKENS:])
        # The first token kept may be the middle of a character. A decoder that replaces a whole
        # run of bytes if any of them is wrong would never show a character of that run.
        starts = (window[n:] for n in range(_OPEN_CHARS + 1))
        self._window = next((w for w in starts if not decode(w).startswith(REPLACEMENT)), window)
        self._shown = decode(self._window)
        self._context = self._whole = len(self._window)

    def take(self, token: int) -> str:
        """Return the text that a token adds, less what may be part of a character."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            if text.endswith(REPLACEMENT) and len(self._window) - self._whole < _BROKEN_TOKENS:
                return ""  # a run of bytes, replaced as a whole until its last character is whole
            text = self._begin_after_whole()
        open_chars = _trailing(text)
        if len(self._window) - self._whole >= _BROKEN_TOKENS:
            open_chars = min(_OPEN_CHARS, open_chars)  # the others are not going to be whole
        # The context's text may end with part of a character, and that counts as shown.
        settled = text[: max(len(self._shown), len(text) - open_chars)]
        piece = settled[len(self._shown) :]
        self._shown = settled
        if not open_chars:
            self._whole = len(self._window)
            if self._whole - self._context >= _CONTEXT_TOKENS:
                self._drop_context()
        elif len(self._window) - self._context >= 2 * _BROKEN_TOKENS:
            piece += self._drop_broken(text)
        return piece

    def flush(self) -> str:
        """Return the text that was held back."""
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            text = self._begin_after_whole()
        piece = text[len(self._shown) :]
        self._shown = text
        return piece

    def _begin_after_whole(self) -> str:
        """Forget the tokens up to the last whole character; return the text of the others."""
        del self._window[: self._whole]
        self._context = self._whole = 0
        self._shown = ""
        return self._decode(self._window)

    def _drop_context(self) -> None:
        """Keep the newer tokens as context, or the older where the newer have no text."""
        newer = self._decode(self._window[self._context :])
        # Blanks and special tokens may have no text of their own and then are no context.
        if newer and self._shown.endswith(newer):
            del self._window[: self._context]
            self._shown = newer
        else:
            del self._window[self._context :]
            self._shown = self._decode(self._window)
        self._context = self._whole = len(self._window)

    def _drop_broken(self, text: str) -> str:
        """Shorten a window in which no token has ended with a whole character for long."""
        context = self._window[: self._context]
        kept = context + self._window[-_BROKEN_TOKENS:]
        shortened = self._decode(kept)
        end = text[-2 * _OPEN_CHARS :]
        if shortened[len(self._decode(context)) :].endswith(end):
            # The last four bytes are there: what follows decodes as it would with the others.
            self._window = kept
            self._whole = self._context
            self._shown = shortened[: len(shortened) - len(text) + len(self._shown)]
            return ""
        # Part of a character, and then special tokens only: it is not going to be whole.
        piece = text[len(self._shown) :]
        self._shown = text
        self._drop_context()
        return piece


class TextStream:
    """Turn tokens, as they come, into pieces of text, up to the first stop string.

    The pieces add up to `decode([*context, *tokens])` without the text of the context, whichever
    way the tokens are split among calls. No piece ends inside a character: its text is held back
    until it is whole. Text that may begin a stop string is held back until that is decided.

    A decoder that replaces a whole run of bytes if its end is no character (`ByteFallback` of the
    library `tokenizers`) would replace characters that were returned already. They stand, and the
    bytes after them are decoded alone.

    Args:
        decode: a tokenizer's function from token ids to text. It sees a bounded number of tokens.
        context: tokens in front of the first one, the prompt; only the last 16 are used.
        stop: strings that end the text. The first to be complete ends it, of those complete at
            the same character the longest. Neither it nor what follows is returned.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
    ) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop is {stop!r}: use a list of strings that are not empty")
        self._decoder = _Decoder(decode, context)
        self._stop = tuple(stop)
        self._held = ""
        self._ended = False
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stopped

    def push(self, new_tokens: Sequence[int], *, finished: bool = False) -> str:
        """Return the text that tokens add to what was returned before.

        Args:
            new_tokens: those after the ones of earlier calls.
            finished: no more will follow: return what is held back. Later calls return "".
        """
        if self._ended:
            return ""
        pieces = []
        for token in new_tokens:
            pieces.append(self._until_stop(self._decoder.take(token)))
            if self._ended:
                return "".join(pieces)
        if finished:
            pieces.append(self._until_stop(self._decoder.flush()))
            pieces.append(self._held)
            self._held = ""
            self._ended = True
        return "".join(pieces)

    def _until_stop(self, piece: str) -> str:
        """Return what can be shown of the text held back and a new piece."""
        if not piece or not self._stop:
            return piece
        text = self._held + piece
        found = [(start + len(s), -len(s), s) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            end, _, self._stopped = min(found)
            self._held = ""
            self._ended = True
            return text[: end - len(self._stopped)]
        longest = max(map(len, self._stop)) - 1
        suffixes = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
        self._held = next((t for t in suffixes if any(s.startswith(t) for s in self._stop)), "")
        return text[: len(text) - len(self._held)]
