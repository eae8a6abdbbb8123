# SPDX-License-Identifier: Apache-2.0
"""Stored responses of `/v1/responses`, in memory and bounded by bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

#: Bytes of an entry besides its JSON: the id and the objects that hold it.
ENTRY_BYTES = 1024


class StoredResponse(NamedTuple):
    """A response and its context, as JSON, so that their size is known."""

    response: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        """The bytes that count against the limit of the store."""
        return len(self.response) + len(self.input_items) + ENTRY_BYTES


class ResponseStore:
    """Responses by id; the oldest responses are evicted first.

    An entry holds all items that precede its response, so that evicting an earlier response of the
    conversation does not break it.

    Args:
        max_bytes: limit of the bytes of all entries; 0 stores nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        # In the order of insertion.
        self._entries: dict[str, StoredResponse] = {}

    def add(self, response: dict[str, Any], input_items: Sequence[dict[str, Any]]) -> bool:
        """Store a response; return whether it fits.

        Args:
            response: the complete response.
            input_items: all items that precede it, with ids.
        """
        entry = StoredResponse(json.dumps(response).encode(), json.dumps(input_items).encode())
        if entry.num_bytes > self.max_bytes:
            return False
        while self.num_bytes + entry.num_bytes > self.max_bytes:
            self.delete(next(iter(self._entries)))
        self._entries[response["id"]] = entry
        self.num_bytes += entry.num_bytes
        return True

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a stored response; None for an unknown or evicted id."""
        return self._entries.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Delete a response; return whether it was stored."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        return True

    def context(self, entry: StoredResponse) -> list[dict[str, Any]]:
        """Return all items up to the end of a stored response."""
        return [*json.loads(entry.input_items), *json.loads(entry.response)["output"]]
