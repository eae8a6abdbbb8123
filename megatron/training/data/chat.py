# SPDX-License-Identifier: Apache-2.0
"""A conversation as token ids and a mask of what is learnt: the assistant's turns, ends included.

The ids are those of the whole rendered text, as `transformers` gives them: special tokens such as
BOS are the template's to write, none are added. Which of its characters
the assistant says is either marked by the template (`{% generation %}`) or found by rendering the
conversation up to the turn with the generation prompt, and with the turn: what is added is learnt,
exactly what a model is asked for at inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from megatron.training.data.chat_template import (
    END_MARK,
    GENERATION_MARKS,
    ChatTemplate,
    Prefix,
    Rendering,
    TemplateRefusal,
    read_chat_template,
)
from megatron.training.data.tokenizers import Tokenizer

__all__ = [
    "ChatTemplate",
    "MalformedConversation",
    "encode_conversations",
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
        self.reason, self.detail = reason, detail


@runtime_checkable
class OffsetTokenizer(Protocol):
    """A tokenizer that knows which characters each of its tokens covers."""

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and their (first, last + 1) characters."""


def encode_conversations(
    conversations: Sequence[object], tokenizer: Tokenizer, template: ChatTemplate
) -> list[tuple[list[int], list[int]] | MalformedConversation]:
    """Turn conversations into token ids and loss masks, or into what is wrong with each.

    Args:
        conversations: each a list of objects with `role` and `content`, both texts.
        tokenizer: of the model.
        template: how the turns are written.

    Returns:
        (ids, mask) of each, or why it cannot be learnt from; mask is 1 on what the assistant says,
        the token that ends it included.

    Raises:
        ValueError: the template is not prefix-stable; no conversation of that kind can be masked.
    """
    found: list[Any] = []
    for messages in conversations:
        try:
            found.append(check_conversation(messages))
        except MalformedConversation as error:
            found.append(error)
    whole = [i for i, turns in enumerate(found) if not isinstance(turns, MalformedConversation)]
    prefixes = [_answers(found[i], template) for i in whole]
    renderings = template.render_all([found[i] for i in whole], prefixes)
    for i, rendering in zip(whole, renderings, strict=True):
        if isinstance(rendering, TemplateRefusal):
            found[i] = MalformedConversation("the template refuses it", str(rendering))
            continue
        text, spans = spoken(found[i], rendering, template)
        ids, mask = _encoded(text, spans, tokenizer, template)
        found[i] = (ids, mask)
        if not any(mask):
            found[i] = MalformedConversation(
                "nothing to learn", "the assistant's turns have no tokens"
            )
    return found


def _encoded(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[int]]:
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


def _answers(turns: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[Prefix]:
    """Return what must be rendered to find the assistant's turns: before and after each."""
    if template.marks_generation:
        return []
    said = [i for i, turn in enumerate(turns) if turn["role"] == ASSISTANT]
    return [p for i in said for p in (Prefix(i, prompt=True), Prefix(i + 1, prompt=False))]


def spoken(
    messages: Sequence[Mapping[str, Any]], rendering: Rendering, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """Find what the assistant says in a rendered conversation.

    Args:
        messages: of the conversation.
        rendering: of it, with the prefixes before and after each of the assistant's turns.
        template: that rendered it.

    Returns:
        (text, spans): spans are (first, last + 1) characters, in order.

    Raises:
        ValueError: the template renders the same turns differently in a longer conversation.
    """
    text = rendering.text
    if template.marks_generation:
        return _marked(text)
    said = [i for i, turn in enumerate(messages) if turn["role"] == ASSISTANT]
    spans = []
    for i, before, after in zip(said, rendering.lengths[::2], rendering.lengths[1::2], strict=True):
        if before is None or after is None or after < before:
            raise ValueError(
                f"{template.name} writes the turns up to message {i} differently when more "
                "follows, so the assistant's part cannot be found: mark it with "
                "{% generation %}, or give --chat-template another one, such as chatml"
            )
        spans.append((before, _end(text[:after], before, messages[i]["content"])))
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
    encode = partial(tokenizer.tokenize, add_special_tokens=False)
    ids = encode(text)
    mask = [0] * len(ids)
    for first, last in spans:
        begin = _common(ids, encode(text[:first]))
        end = _common(ids, encode(text[:last]))
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count how many ids two lists have in common from the start."""
    same = (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    return next(same, min(len(ids), len(others)))
