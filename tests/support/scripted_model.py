# SPDX-License-Identifier: Apache-2.0
"""A model that says what a test has it say, and a chat template for it."""

from __future__ import annotations

import torch

from tests.support.http_server import END, NextByte

#: Shows all that a conversation has.
TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}[{{ m.role }} {{ m.content }}"
    "{% if m.reasoning_content %} thought {{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls %} called {{ c.function.name }}"
    " {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}]{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% if thinks %}<think>\n{% endif %}{% endif %}"
)


class Scripted(NextByte):
    """Says a text, one byte a step, whatever it is asked: for one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = b""
        self._place = 0

    def say(self, text: str) -> None:
        """Have the next answer be a text."""
        self._bytes, self._place = text.encode(), 0

    def __call__(self, tokens: torch.Tensor, **context: object) -> torch.Tensor:
        self.gate.wait()
        self.before()
        following = END if self._place >= len(self._bytes) else self._bytes[self._place]
        self._place += 1
        chosen = torch.full_like(tokens.t(), following)
        return 5 * torch.nn.functional.one_hot(chosen, END + 1).float()
