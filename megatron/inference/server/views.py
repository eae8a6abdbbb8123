# SPDX-License-Identifier: Apache-2.0
"""How OpenAI's routes show the deltas of a generation: choices, chunks and log-probabilities."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.core.inference.text_stream import REPLACEMENT
from megatron.inference.server.answer_parser import Part
from megatron.inference.server.generation import Delta, TokenScore


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


class CompletionView:
    """`/v1/completions`.

    Args:
        model: its name.
        token_text: returns the text of one token.
        outputs: of the request.
        logprobs: whether they were asked for.
        prefixes: texts of the prompts where outputs begin with them.
    """

    def __init__(
        self,
        model: str,
        token_text: Callable[[int], str],
        *,
        outputs: int,
        logprobs: bool,
        prefixes: Sequence[str] | None = None,
    ) -> None:
        self.outputs, self._model, self._token_text = outputs, model, token_text
        self._logprobs, self._prefixes = logprobs, prefixes
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._begun: set[int] = set()
        self._offsets = [0] * outputs

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
        parts = [one for delta in deltas for one in self.chunk_choices(delta)]
        found = {**parts[-1], "text": "".join(part["text"] for part in parts)}
        found["weight_epochs"] = [epoch for part in parts for epoch in part["weight_epochs"]]
        if self._logprobs:
            names = found["logprobs"]
            found["logprobs"] = {k: [v for p in parts for v in p["logprobs"][k]] for k in names}
        return found

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choice that shows a delta."""
        text, scores = delta.text, [*(delta.prompt_scores or ()), *delta.scores]
        if self._prefixes is not None and delta.index not in self._begun:
            text = self._prefixes[delta.index * len(self._prefixes) // self.outputs] + text
        self._begun.add(delta.index)
        logprobs = self._scores(delta.index, scores) if self._logprobs else None
        found = {"index": delta.index, "text": text, "logprobs": logprobs, **_ending(delta)}
        return [{**found, "weight_epochs": list(delta.epochs)}]

    def _scores(self, index: int, scores: Sequence[TokenScore]) -> dict[str, list[Any]]:
        """Return log-probabilities by columns; places of tokens count their own texts."""
        texts = [self._token_text(score.id) for score in scores]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [self._top(score) for score in scores],
            "text_offset": offsets,
        }

    def _top(self, score: TokenScore) -> dict[str, float] | None:
        """Return alternatives by their texts; of those with one text the most probable counts."""
        if score.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in score.top:
            found.setdefault(self._token_text(token), logprob)
        return found


class ChatView:
    """`/v1/chat/completions`.

    Args:
        model: its name.
        token_text: returns the text of one token.
        outputs: of the request.
        logprobs: whether they were asked for.
    """

    def __init__(
        self, model: str, token_text: Callable[[int], str], *, outputs: int, logprobs: bool
    ) -> None:
        self.outputs, self._model, self._token_text = outputs, model, token_text
        self._logprobs = logprobs
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._begun: set[int] = set()
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
        for part in (part for delta in deltas for part in delta.parts):
            if part.kind == "call":
                calls.append(self._call(part.text))
            elif part.kind == "arguments":
                calls[-1]["function"]["arguments"] += part.text
            elif part.kind in texts:
                texts[part.kind] += part.text
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
        found = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            found.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        # Of tokens without a text yet they come with the next chunk.
        epochs = [*self._epochs.pop(delta.index, ()), *delta.epochs]
        shown = [fields for part in delta.parts if (fields := self._fields(delta.index, part))]
        if not shown and self._logprobs and delta.scores:
            shown.append({"content": ""})
        for fields in shown:
            found.append(self._chunk(delta.index, fields))
        if shown:  # the tokens of a step are told of once
            told = {"logprobs": self._scores(delta.scores), "weight_epochs": epochs}
            found[-len(shown)] |= told
            epochs = []
        if delta.finish_reason:
            ending = {**_ending(delta), "weight_epochs": epochs}
            found.append(self._chunk(delta.index, {}, **ending))
        else:
            self._epochs[delta.index] = epochs
        return found

    def _fields(self, index: int, part: Part) -> dict[str, Any] | None:
        """Return how a chunk shows a part."""
        if part.kind == "text":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        if part.kind == "call":
            self._calls[index] += 1
            return {"tool_calls": [{"index": self._calls[index], **self._call(part.text)}]}
        if part.kind == "arguments":
            call = {"index": self._calls[index], "function": {"arguments": part.text}}
            return {"tool_calls": [call]}
        return None

    def _call(self, name: str) -> dict[str, Any]:
        """Return a call that begins."""
        function = {"name": name, "arguments": ""}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None

        def one(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._token_text(token)
            # Part of a character has no text of its own, and its bytes are not known.
            known = None if REPLACEMENT in text else list(text.encode())
            return {"token": text, "logprob": logprob, "bytes": known}

        return {
            "content": [
                {**one(score.id, score.logprob), "top_logprobs": [one(*top) for top in score.top]}
                for score in scores
            ],
            "refusal": None,
        }
