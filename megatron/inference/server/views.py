# SPDX-License-Identifier: Apache-2.0
"""How OpenAI's routes show the deltas of a generation: choices, chunks and log-probabilities."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.core.inference.text_stream import REPLACEMENT
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
        text = "".join(delta.text for delta in deltas)
        scores = [score for delta in deltas for score in delta.scores]
        return {
            "index": deltas[-1].index,
            "message": {"role": "assistant", "content": text, "refusal": None},
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
        if delta.text or (self._logprobs and delta.scores):
            more = {"logprobs": self._scores(delta.scores), "weight_epochs": epochs}
            found.append(self._chunk(delta.index, {"content": delta.text}, **more))
            epochs = []
        if delta.finish_reason:
            ending = {**_ending(delta), "weight_epochs": epochs}
            found.append(self._chunk(delta.index, {}, **ending))
        else:
            self._epochs[delta.index] = epochs
        return found

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
