# SPDX-License-Identifier: Apache-2.0
"""Formats of OpenAI's completion and chat routes: choices, chunks and log-probabilities."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

from megatron.cli.tokenizers import Tokenizer
from megatron.core.inference.text_stream import REPLACEMENT, TextStream
from megatron.inference.server.output_processor import Delta, TokenScore
from megatron.inference.server.tool_parsers.output_parser import AnswerPart

# Size of the cache of token texts of a completion view.
_CACHED_TEXTS = 4096


class View(Protocol):
    """The format of a route's answers."""

    outputs: int
    """Number of outputs of the request."""

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return the fields of an answer, or of a chunk, besides its choices."""
        ...

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice of a complete output from all of its deltas."""
        ...

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of a delta; each choice becomes a chunk."""
        ...


def _ending(delta: Delta) -> dict[str, Any]:
    """Return why an output has ended; `stop_reason` is the stop string."""
    return {"finish_reason": delta.finish_reason or None, "stop_reason": delta.stop}


def token_text(tokenizer: Tokenizer, token: int, *, mark: str = "") -> str:
    """Return the text of one token within a text.

    Args:
        tokenizer: tokenizer of the model.
        token: token id; a token without text is shown by its name, or as `token_id:ID`.
        mark: prefix of a token with incomplete characters, whose bytes are shown as `\\xe6`.
    """
    raw = tokenizer.bytes_of(token)
    if raw is None:
        return tokenizer.detokenize([token]) or tokenizer.name_of(token) or f"token_id:{token}"
    try:
        return raw.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """Return the UTF-8 bytes of a token: empty for a special token, None if unknown."""
    raw = tokenizer.bytes_of(token)
    if raw is None:
        text = tokenizer.detokenize([token])
        return None if REPLACEMENT in text else list(text.encode())
    return list(raw)


class _TextOffsets:
    """Compute the character offset of each token in a text.

    A token that continues a character has the offset of that character. Invalid bytes count as in
    the decoded text: one replacement character for each, or one for all, as the tokenizer decodes.

    Args:
        tokenizer: tokenizer of the model.
        context: tokens before the first token.
        start: number of characters before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, start: int) -> None:
        self._tokenizer, self._stream = tokenizer, TextStream(tokenizer.detokenize, context)
        self._returned = start  # characters up to the end of the stream's text
        self._count = start  # complete characters and final replacements
        self._partial, self._partial_tokens = b"", list[int]()  # of an incomplete character
        self._unsettled = False  # whether the stream holds back characters

    def add(self, token: int) -> tuple[int, str]:
        """Return the offset of the next token, and the text that it completes."""
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
            if text and new_text.endswith(text):  # exact, whatever precedes the token
                offset = self._returned - len(text)
        return offset, new_text

    def _end_partial(self) -> None:
        """Count the bytes of a character that stays incomplete."""
        first_bytes = self._tokenizer.bytes_of(self._partial_tokens[0]) or b""
        text = self._tokenizer.detokenize(self._partial_tokens)
        self._count += len(text) if len(first_bytes) == 1 else 1
        self._partial, self._partial_tokens = b"", []


def _is_single_char(partial: bytes) -> bool:
    """Return whether bytes are one character, or the start of one."""
    return len(partial.decode(errors="replace")) == 1


class CompletionView:
    """`/v1/completions`.

    Args:
        model: name of the model.
        tokenizer: tokenizer of the model.
        prompts: token ids of each prompt.
        n: number of outputs per prompt.
        logprobs: whether to report log-probabilities.
        echo: whether outputs start with the text of their prompt.
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
        # Cached: the same alternatives occur at many positions.
        text_of = partial(token_text, tokenizer, mark="bytes:")
        self._text: Callable[[int], str] = lru_cache(maxsize=_CACHED_TEXTS)(text_of)

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return the fields besides the choices; chunks have the same fields."""
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice of a complete output from all of its deltas."""
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
        """Return the choice of a delta."""
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
        """Return log-probabilities as columns."""
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [],
            "text_offset": [],
        }
        for score in scores:
            offset, decoded = offsets.add(score.id)
            text = self._text(score.id)
            # Decoding drops a blank at the start of a text.
            text = decoded if decoded and text == f" {decoded}" else text
            columns["tokens"].append(text)
            columns["top_logprobs"].append(self._top(score, text))
            columns["text_offset"].append(offset)
        return columns

    def _top(self, score: TokenScore, text: str) -> dict[str, float] | None:
        """Return alternatives by text; alternatives with a duplicate text by id.

        Args:
            score: score of the token.
            text: text of the token.
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
        model: name of the model.
        tokenizer: tokenizer of the model.
        outputs: number of outputs of the request.
        logprobs: whether to report log-probabilities.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, *, outputs: int, logprobs: bool) -> None:
        self.outputs, self._model, self._tokenizer = outputs, model, tokenizer
        self._logprobs = logprobs
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._started: set[int] = set()
        self._epochs: dict[int, list[int]] = {}
        self._calls = [-1] * outputs  # index of the newest call

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return the fields of an answer, or of a chunk, besides its choices."""
        return {
            "id": self._id,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self._created,
            "model": self._model,
        }

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice of a complete output from all of its deltas."""
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
        """Return the choices of a delta. The first choice of an output has the role, the last has
        only the finish reason."""
        choices = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            choices.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        # The epochs of tokens without text yet are sent with the next chunk.
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
        if chunk_fields:  # only one chunk of a step reports its tokens
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
        """Return the chunk's fields for a part; None for no chunk."""
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
        """Return a new tool call without arguments."""
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
