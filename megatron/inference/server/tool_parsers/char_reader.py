# SPDX-License-Identifier: Apache-2.0
"""A reader of characters for parsers that try one syntax and return to another."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Generator, Sequence

# Limits on the name of a tool or parameter and on white space within the head of a call. They bound
# the characters that are parsed again as text if the head turns out to be no call.
_MAX_NAME_CHARS = 256
_MAX_WHITESPACE = 64

_JSON_CHARS = frozenset("[]{},: \t\n\r+-.0123456789eEtrufalsn")

#: A parser that is suspended until the next character, and its result.
Step = Generator[None, str, None]
Reads = Generator[None, str, bool]


class CharReader:
    """Reads one character at a time, and pushes characters back to be parsed again.

    Attributes:
        char: the current character; "" at the end.
        consumed: characters since the head of a call.
        finished: whether the answer has ended.
        cut_off: whether the answer ended at a limit.
        after_call: whether a call has begun; characters that are pushed back at the end of an
            answer that was cut off are dropped then, as they are an incomplete mark.
    """

    def __init__(self) -> None:
        self.char, self.consumed = "", list[str]()
        self.finished = self.cut_off = self.after_call = False
        self._pushback: deque[str] = deque()  # characters to parse again

    def begin(self) -> Step:
        """Read the first character."""
        self.char = (yield) or ""

    def advance(self) -> Step:
        """Read the next character."""
        self.consumed.append(self.char)
        if self._pushback:
            self.char = self._pushback.popleft()
        elif self.finished:
            self.char = ""
        else:
            self.char = (yield) or ""

    def unread(self, text: Sequence[str]) -> None:
        """Push characters back, before the current character."""
        if text and self.after_call and self.cut_off and not self.char:
            self.consumed.clear()
        elif text:
            current_char = [self.char] if self.char else []
            self._pushback.extendleft(reversed([*text, *current_char]))
            self.char = self._pushback.popleft()
            del self.consumed[len(self.consumed) - len(text) :]

    def rewind(self, start: int) -> None:
        """Push the characters since `start` back, as they are no mark. At the end of an answer that
        was cut off, an incomplete mark after parts of a call is dropped."""
        if self.cut_off and start == 0:
            self._pushback.clear()
            self.char = ""
            self.consumed.clear()
        else:
            self.unread(self.consumed[start:])

    def match(self, text: str) -> Reads:
        """Match a text; return whether it matched, else consume nothing."""
        for index, char in enumerate(text):
            if self.char != char:
                self.unread(text[:index])
                return False
            yield from self.advance()
        return True

    def match_any(self, texts: Sequence[str]) -> Reads:
        """Match one of the texts; return whether one matched, else consume nothing."""
        for text in texts:
            if (yield from self.match(text)):
                return True
        return False

    def blank(self) -> Step:
        """Skip white space."""
        for _ in range(_MAX_WHITESPACE):
            if not self.char.isspace():
                break
            yield from self.advance()

    def match_all(self, patterns: Sequence[str | tuple[str, ...]]) -> Reads:
        """Match texts with white space around them; return whether all matched."""
        for pattern in patterns:
            yield from self.blank()
            texts = [pattern] if isinstance(pattern, str) else pattern
            if not (yield from self.match_any([text.strip() for text in texts])):
                return False
        yield from self.blank()
        return True

    def until(self, end: str, stops: Sequence[str] = ()) -> Generator[None, str, str | None]:
        """Parse a name up to `end`; None if `end` is missing.

        Args:
            end: text that ends the name, and is consumed. One of `stops` ends the name as well if
                `end` is white space or empty.
            stops: texts that cannot be part of the name; they are not consumed.
        """
        name = ""
        while self.char and len(name) <= _MAX_NAME_CHARS:
            if end and self.char == end[0] and (yield from self.match(end)):
                return name.strip()
            if (yield from self.at_any(stops)):
                return None if end.strip() else name.strip()
            name += self.char
            yield from self.advance()
        return None

    def at_any(self, texts: Sequence[str]) -> Reads:
        """Return whether one of the texts is next; consume nothing."""
        for text in texts:
            if self.char == text[0] and (yield from self.match(text)):
                self.unread(text)
                return True
        return False

    def key(self) -> Generator[None, str, str | None]:
        """Parse a key and its colon; None on a mismatch."""
        key = yield from self.string()
        yield from self.blank()
        if key is None or not (yield from self.match(":")):
            return None
        yield from self.blank()
        return key

    def string(self) -> Generator[None, str, str | None]:
        """Parse a JSON string of at most `_MAX_NAME_CHARS`; None on a mismatch."""
        text = (yield from self.quoted(_MAX_NAME_CHARS)) if self.char == '"' else None
        try:
            return None if text is None else json.loads(text, strict=False)
        except ValueError:
            return None

    def quoted(self, max_chars: float = math.inf) -> Generator[None, str, str | None]:
        """Parse a JSON string; return it with its quotes, None if it is incomplete."""
        start, escaped = len(self.consumed), False
        yield from self.advance()
        while self.char and len(self.consumed) - start <= max_chars:
            closes = self.char == '"' and not escaped
            escaped = self.char == "\\" and not escaped
            yield from self.advance()
            if closes:
                return "".join(self.consumed[start:])
        return None

    def json_text(self) -> Generator[None, str, str | None]:
        """Parse a JSON value; return its text, None at a character that cannot be JSON.

        It checks that brackets match and that only JSON characters occur outside of strings. At
        most two false starts in a text can therefore run on for long, which bounds the cost.
        """
        start, brackets = len(self.consumed), list[str]()
        while self.char:
            char = self.char
            if char == '"':
                if (yield from self.quoted()) is None:
                    return None
            elif char not in _JSON_CHARS:
                return None
            else:
                if char in "[{":
                    brackets.append("]" if char == "[" else "}")
                elif char in "]}" and (not brackets or brackets.pop() != char):
                    return None
                yield from self.advance()
            may_be_complete = char in '"]}' or self.char in ",]}" or self.char.isspace()
            if may_be_complete and not brackets:
                return "".join(self.consumed[start:])
        return None
