# SPDX-License-Identifier: Apache-2.0
"""How OpenAI's routes show the deltas of a generation: choices, chunks and log-probabilities."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

from megatron.cli.tokenizers import Tokenizer
from megatron.core.inference.text_stream import REPLACEMENT, TextStream
from megatron.inference.server.answer_parser import AnswerPart
from megatron.inference.server.generation import Delta, TokenScore

# Texts of tokens that a view of completions keeps.
_CACHED_TEXTS = 4096


class View(Protocol):
    """What a route makes of deltas."""

    outputs: int
    """Outputs of the request."""

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return what stands before the choices of an answer, or of a chunk."""
        ...

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a whole output from all of its deltas."""
        ...

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices that show a delta, each for a chunk of its own."""
        ...


def _ending(delta: Delta) -> dict[str, Any]:
    """Return why an output has ended; `stop_reason` is the stop string."""
    return {"finish_reason": delta.finish_reason or None, "stop_reason": delta.stop}


def token_text(tokenizer: Tokenizer, token: int, *, mark: str = "") -> str:
    """Return the text of one token within a text.

    Args:
        tokenizer: of the model.
        token: an id; one without a text is shown by its name, or as `token_id:ID`.
        mark: stands before the bytes of a token that is no whole character, `\\xe6` each.
    """
    raw = tokenizer.bytes_of(token)
    if raw is None:
        return tokenizer.detokenize([token]) or tokenizer.name_of(token) or f"token_id:{token}"
    try:
        return raw.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """Return what a token adds to the bytes of a text: nothing if it is special; None if that is
    not known."""
    raw = tokenizer.bytes_of(token)
    if raw is None:
        text = tokenizer.detokenize([token])
        return None if REPLACEMENT in text else list(text.encode())
    return list(raw)


class _TextOffsets:
    """Count the characters of a text before each of its tokens.

    A token that continues a character has the offset of that character. Bytes that are no
    character count as decoding shows them, by one replacement for all or for each.

    Args:
        tokenizer: of the model.
        context: tokens before the first one.
        start: characters before the first one.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, start: int) -> None:
        self._tokenizer, self._stream = tokenizer, TextStream(tokenizer.detokenize, context)
        self._returned = start  # characters that the stream has returned, and those before it
        self._count = start  # characters that are whole, and replacements that will stay
        self._partial, self._partial_tokens = b"", list[int]()  # of a character that may continue
        self._unsettled = False  # the stream may hold the last characters back

    def add(self, token: int) -> tuple[int, str]:
        """Return the offset of the next token, and the text that is whole with it."""
        raw = self._tokenizer.bytes_of(token) or b""
        continues = bool(self._partial and raw) and _is_single_char(self._partial + raw[:1])
        if self._partial and raw and not continues:
            self._end_partial()
        offset = self._count
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._partial + raw)
        self._count += len(text)
        new_text = self._stream.push([token])
        self._returned += len(new_text)
        if raw:
            self._partial = decoder.getstate()[0]
            tokens = self._partial_tokens if continues and not text else []
            self._partial_tokens = [*tokens, token] if self._partial else []
            open_end = bool(self._partial) or text.endswith(REPLACEMENT)
            returns_all = bool(new_text) and not new_text.endswith(REPLACEMENT)
            self._unsettled = open_end or (self._unsettled and not returns_all)
        if not self._unsettled:
            self._count = self._returned
            if text and new_text.endswith(text):  # exact, whatever stands before it
                offset = self._returned - len(text)
        return offset, new_text

    def _end_partial(self) -> None:
        """Count the bytes of a character that does not continue."""
        first_bytes = self._tokenizer.bytes_of(self._partial_tokens[0]) or b""
        text = self._tokenizer.detokenize(self._partial_tokens)
        self._count += len(text) if len(first_bytes) == 1 else 1
        self._partial, self._partial_tokens = b"", []


def _is_single_char(partial: bytes) -> bool:
    """Return whether bytes are one character, or the beginning of one."""
    return len(partial.decode(errors="replace")) == 1


class CompletionView:
    """`/v1/completions`.

    Args:
        model: its name.
        tokenizer: of the model.
        prompts: token ids of each.
        n: outputs of each prompt.
        logprobs: whether they were asked for.
        echo: outputs begin with the texts of their prompts.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        prompts: Sequence[Sequence[int]],
        n: int,
        logprobs: bool,
        echo: bool,
    ) -> None:
        self.outputs, self._model, self._tokenizer = len(prompts) * n, model, tokenizer
        self._prompts, self._logprobs = prompts, logprobs
        self._prefixes = [tokenizer.detokenize(prompt) if echo else "" for prompt in prompts]
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._started: set[int] = set()
        self._offsets: dict[int, _TextOffsets] = {}
        # Alternatives of one place are those of others, too.
        text_of = partial(token_text, tokenizer, mark="bytes:")
        self._text: Callable[[int], str] = lru_cache(maxsize=_CACHED_TEXTS)(text_of)

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return what stands before the choices; chunks have the same."""
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a whole output from all of its deltas."""
        choices = [choice for delta in deltas for choice in self.chunk_choices(delta)]
        merged = {**choices[-1], "text": "".join(choice["text"] for choice in choices)}
        merged["weight_epochs"] = [epoch for choice in choices for epoch in choice["weight_epochs"]]
        if self._logprobs:
            names = merged["logprobs"]
            merged["logprobs"] = {
                k: [v for choice in choices for v in choice["logprobs"][k]] for k in names
            }
        return merged

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choice that shows a delta."""
        text = delta.text
        prompt_index = delta.index * len(self._prompts) // self.outputs
        if delta.index not in self._started:
            self._started.add(delta.index)
            text = self._prefixes[prompt_index] + text
            if self._logprobs:
                prompt, start = self._prompts[prompt_index], len(self._prefixes[prompt_index])
                offsets = _TextOffsets(self._tokenizer, prompt, start=start)
                self._offsets[delta.index] = offsets
        logprobs = None
        if self._logprobs:
            logprobs = self._scores(delta.scores, self._offsets[delta.index])
        if logprobs is not None and delta.prompt_scores is not None:
            offsets = _TextOffsets(self._tokenizer, (), start=0)
            prompt_columns = self._scores(delta.prompt_scores, offsets)
            logprobs = {name: prompt_columns[name] + logprobs[name] for name in logprobs}
        choice = {"index": delta.index, "text": text, "logprobs": logprobs, **_ending(delta)}
        return [{**choice, "weight_epochs": list(delta.epochs)}]

    def _scores(self, scores: Sequence[TokenScore], offsets: _TextOffsets) -> dict[str, list[Any]]:
        """Return log-probabilities by columns."""
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [],
            "text_offset": [],
        }
        for score in scores:
            offset, decoded = offsets.add(score.id)
            text = self._text(score.id)
            # Decoding drops the blank that begins a text.
            text = decoded if decoded and text == f" {decoded}" else text
            columns["tokens"].append(text)
            columns["top_logprobs"].append(self._top(score, text))
            columns["text_offset"].append(offset)
        return columns

    def _top(self, score: TokenScore, text: str) -> dict[str, float] | None:
        """Return alternatives by their texts; one whose text is another's too, by its id.

        Args:
            score: of a token.
            text: of the token.
        """
        if score.logprob is None:
            return None
        alternatives: dict[str, float] = {}
        for token, logprob in score.top:
            name = text if token == score.id else self._text(token)
            if name in alternatives or (name == text and token != score.id):
                name = f"token_id:{token}"
            alternatives[name] = logprob
        return alternatives


class ChatView:
    """`/v1/chat/completions`.

    Args:
        model: its name.
        tokenizer: of the model.
        outputs: of the request.
        logprobs: whether they were asked for.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, *, outputs: int, logprobs: bool) -> None:
        self.outputs, self._model, self._tokenizer = outputs, model, tokenizer
        self._logprobs = logprobs
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._started: set[int] = set()
        self._epochs: dict[int, list[int]] = {}
        self._calls = [-1] * outputs  # the last one begun

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return what stands before the choices of an answer, or of a chunk."""
        return {
            "id": self._id,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self._created,
            "model": self._model,
        }

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a whole output from all of its deltas."""
        index = deltas[-1].index
        texts = {"text": "", "reasoning": ""}
        calls: list[dict[str, Any]] = []
        for answer_part in (answer_part for delta in deltas for answer_part in delta.answer_parts):
            if answer_part.kind == "call":
                calls.append(self._call(answer_part.text))
            elif answer_part.kind == "arguments":
                calls[-1]["function"]["arguments"] += answer_part.text
            elif answer_part.kind in texts:
                texts[answer_part.kind] += answer_part.text
        scores = [score for delta in deltas for score in delta.scores]
        message = {
            "role": "assistant",
            "content": None if calls and not texts["text"] else texts["text"],
            "refusal": None,
        }
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._scores(scores),
            "weight_epochs": [epoch for delta in deltas for epoch in delta.epochs],
            **_ending(deltas[-1]),
        }

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices that show a delta: the first one of an output says whose turn it is,
        the last one only why it ended."""
        choices = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            choices.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        # Of tokens without a text yet they come with the next chunk.
        epochs = [*self._epochs.pop(delta.index, ()), *delta.epochs]
        chunk_fields = [
            fields
            for answer_part in delta.answer_parts
            if (fields := self._fields(delta.index, answer_part))
        ]
        if not chunk_fields and self._logprobs and delta.scores:
            chunk_fields.append({"content": ""})
        for fields in chunk_fields:
            choices.append(self._chunk(delta.index, fields))
        if chunk_fields:  # the tokens of a step are told of once
            token_fields = {"logprobs": self._scores(delta.scores), "weight_epochs": epochs}
            choices[-len(chunk_fields)] |= token_fields
            epochs = []
        if delta.finish_reason:
            ending = {**_ending(delta), "weight_epochs": epochs}
            choices.append(self._chunk(delta.index, {}, **ending))
        else:
            self._epochs[delta.index] = epochs
        return choices

    def _fields(self, index: int, answer_part: AnswerPart) -> dict[str, Any] | None:
        """Return how a chunk shows a part."""
        if answer_part.kind == "text":
            return {"content": answer_part.text}
        if answer_part.kind == "reasoning":
            return {"reasoning_content": answer_part.text}
        if answer_part.kind == "call":
            self._calls[index] += 1
            return {"tool_calls": [{"index": self._calls[index], **self._call(answer_part.text)}]}
        if answer_part.kind == "arguments":
            call = {"index": self._calls[index], "function": {"arguments": answer_part.text}}
            return {"tool_calls": [call]}
        return None

    def _call(self, name: str) -> dict[str, Any]:
        """Return a call that begins."""
        function = {"name": name, "arguments": ""}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

    def _chunk(self, index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None

        def token_score(token: int, logprob: float | None) -> dict[str, Any]:
            text, in_bytes = (show(self._tokenizer, token) for show in (token_text, token_bytes))
            return {"token": text, "logprob": logprob, "bytes": in_bytes}

        return {
            "content": [
                {
                    **token_score(score.id, score.logprob),
                    "top_logprobs": [token_score(*top) for top in score.top],
                }
                for score in scores
            ],
            "refusal": None,
        }
