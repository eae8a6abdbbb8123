# SPDX-License-Identifier: Apache-2.0
"""A conversation as token ids and a mask of what is learnt: the assistant's turns, ends included.

The ids are those of the whole rendered text, as `transformers` gives them. Which of its characters
the assistant says is either marked by the template (`{% generation %}`) or found by rendering the
conversation up to the turn with the generation prompt, and with the turn: what is added is learnt,
exactly what a model is asked for at inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from megatron.training.data.chat_template import (
    END_MARK,
    GENERATION_MARKS,
    ChatTemplate,
    TemplateRefusal,
    read_chat_template,
)
from megatron.training.data.tokenizers import Tokenizer

__all__ = [
    "ChatTemplate",
    "MalformedConversation",
    "encode_conversation",
    "read_chat_template",
]

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"
_FIRST_ROLES = ("system", "developer", "user")
_MARKS = (END_MARK, *GENERATION_MARKS)


class MalformedConversation(ValueError):
    """A conversation that cannot be learnt from; `reason` is a short text to count by."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@runtime_checkable
class OffsetTokenizer(Protocol):
    """A tokenizer that knows which characters each of its tokens covers."""

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and their (first, last + 1) characters."""


def encode_conversation(
    messages: object, tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[int]]:
    """Turn a conversation into token ids and a loss mask.

    Args:
        messages: list of objects with `role` and `content`, both texts.
        tokenizer: of the model.
        template: how the turns are written.

    Returns:
        (ids, mask): mask is 1 on what the assistant says, the token that ends it included.

    Raises:
        MalformedConversation: this conversation is none, or the template refuses it.
        ValueError: the template is not prefix-stable; no conversation of that kind can be masked.
    """
    turns = check_conversation(messages)
    try:
        text, spans = spoken(turns, template)
    except TemplateRefusal as error:
        raise MalformedConversation("the template refuses it", str(error)) from None
    ids: list[int] = []
    mask: list[int] = []
    start = 0
    pieces = text.split(END_MARK)
    for i, piece in enumerate(pieces):
        stop = start + len(piece)
        inside = [(max(a, start) - start, min(b, stop) - start) for a, b in spans]
        found, learnt = _tokens(piece, [(a, b) for a, b in inside if a < b], tokenizer)
        ids += found
        mask += learnt
        if i + 1 < len(pieces):
            if tokenizer.eod is None:
                raise ValueError(
                    f"{template.name} ends turns with the end-of-document token, which the "
                    "tokenizer lacks: choose another --chat-template"
                )
            ids.append(tokenizer.eod)
            mask.append(int(any(a <= stop < b for a, b in spans)))
        start = stop + 1
    if not any(mask):
        raise MalformedConversation("nothing to learn", "the assistant's turns have no tokens")
    return ids, mask


def check_conversation(messages: object) -> list[Mapping[str, Any]]:
    """Return the turns of a conversation.

    Raises:
        MalformedConversation: it is not a list of turns with known roles and texts, the assistant
            never speaks, or speaks first.
    """
    if not isinstance(messages, list) or not messages:
        raise MalformedConversation("no list of messages")
    for i, turn in enumerate(messages):
        if not isinstance(turn, dict) or "role" not in turn:
            raise MalformedConversation("a message without a role", f"message {i}")
        if turn["role"] not in ROLES:
            raise MalformedConversation("unknown role", f"message {i} has {turn['role']!r:.40}")
        if not isinstance(turn.get("content"), str):
            raise MalformedConversation("content is no text", f"message {i}")
        if any(mark in turn["content"] for mark in _MARKS):
            raise MalformedConversation("a reserved character", f"message {i}, U+E0F0 to U+E0F2")
        if i and turn["role"] == "system":
            raise MalformedConversation("a system message is not the first", f"message {i}")
    if messages[0]["role"] not in _FIRST_ROLES:
        raise MalformedConversation(f"the {messages[0]['role']} speaks first")
    if all(turn["role"] != ASSISTANT for turn in messages):
        raise MalformedConversation("no assistant message")
    return messages


def spoken(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation and find what the assistant says in it.

    Returns:
        (text, spans): spans are (first, last + 1) characters, in order.

    Raises:
        TemplateRefusal: the template cannot render it.
        ValueError: the template renders the same turns differently in a longer conversation.
    """
    text = template.render(messages)
    if template.marks_generation:
        return _marked(text)
    spans = []
    for i, turn in enumerate(messages):
        if turn["role"] != ASSISTANT:
            continue
        before = template.render(messages[:i], add_generation_prompt=True)
        after = template.render(messages[: i + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"{template.name} writes the turns up to message {i} differently when more "
                "follows, so the assistant's part cannot be found: mark it with "
                "{% generation %}, or give --chat-template another one, such as chatml"
            )
        spans.append((len(before), _end(after, len(before), turn["content"])))
    return text, [(a, b) for a, b in spans if a < b]


def _end(after: str, start: int, content: str) -> int:
    """Leave out white space behind the mark that ends a turn: a model stops at the mark."""
    said = after[start:].rstrip()
    if said.endswith(content.rstrip()):  # there is no mark: the white space ends the turn
        return len(after)
    return start + len(said)


def _marked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Take the marks of `{% generation %}` out of a text; return it and where they stood."""
    opening, closing = GENERATION_MARKS
    first, *parts = text.split(opening)
    plain, spans = first, []
    for part in parts:
        said, _, rest = part.partition(closing)
        spans.append((len(plain), len(plain) + len(said)))
        plain += said + rest
    return plain, spans


def _tokens(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """Return ids of a text and 1 for each that covers a character of a span."""
    if not text:
        return [], []
    if isinstance(tokenizer, OffsetTokenizer):
        ids, offsets = tokenizer.tokenize_with_offsets(text)
        return ids, [int(any(a < last and first < b for a, b in spans)) for first, last in offsets]
    ids = tokenizer.tokenize(text)
    mask = [0] * len(ids)
    for first, last in spans:
        begin = _common(ids, tokenizer.tokenize(text[:first]))
        end = _common(ids, tokenizer.tokenize(text[:last]))
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count how many ids two lists have in common from the start."""
    same = (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    return next(same, min(len(ids), len(others)))
