# SPDX-License-Identifier: Apache-2.0
"""Responses with `choices`, in OpenAI's completion and chat APIs."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from megatron.inference.server.middleware.api_error import ApiError
from megatron.inference.server.output_processor import Delta, Usage

STREAM_END = "[DONE]"


class ChoicesFormatter(ABC):
    """Formats the deltas of a request as choices.

    Args:
        usage: token counts of the request, which grow with each delta.
        outputs: number of outputs of the request.
        kind, chunk_kind: `object` of a complete response and of a chunk.
        id_prefix: prefix of the response's id.
        model: name of the model.
        include_usage: report the usage in the last chunk.
        request_id: id of the request, for errors.
    """

    def __init__(
        self,
        usage: Usage,
        *,
        outputs: int,
        kind: str,
        chunk_kind: str,
        id_prefix: str,
        model: str,
        include_usage: bool,
        request_id: str,
    ) -> None:
        self.outputs, self._usage = outputs, usage
        self._kind, self._chunk_kind = kind, chunk_kind
        self._include_usage, self._request_id = include_usage, request_id
        self._id, self._created = f"{id_prefix}-{secrets.token_hex(12)}", int(time.time())
        self._model = model

    @abstractmethod
    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice of a complete output from all of its deltas."""

    @abstractmethod
    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of a delta; each choice becomes a chunk."""

    def complete(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the complete response from all of its deltas."""
        output_deltas: list[list[Delta]] = [[] for _ in range(self.outputs)]
        for delta in deltas:
            output_deltas[delta.index].append(delta)
        choices = [self.choice(deltas) for deltas in output_deltas]
        return {**self._head(self._kind), "choices": choices, "usage": self._usage.to_json()}

    def events(self, delta: Delta) -> list[str]:
        """Return the chunks of a delta."""
        return [self._chunk([choice], usage=None) for choice in self.chunk_choices(delta)]

    def closing_events(self) -> list[str]:
        """Return the chunk with the usage, if it is requested, and the end of the stream."""
        usage = [self._chunk([], usage=self._usage.to_json())] if self._include_usage else []
        return [*usage, STREAM_END]

    def error(self, error: ApiError) -> str:
        """Return the event of an error, which ends the stream."""
        return json.dumps(error.to_json(self._request_id))

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields besides the choices and the usage."""
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choices: Sequence[dict[str, Any]], *, usage: dict[str, Any] | None) -> str:
        usage_field = {"usage": usage} if self._include_usage else {}
        return json.dumps({**self._head(self._chunk_kind), "choices": choices, **usage_field})


def ending(delta: Delta) -> dict[str, Any]:
    """Return why an output has ended; `stop_reason` is the stop string."""
    return {"finish_reason": delta.finish_reason or None, "stop_reason": delta.stop}
