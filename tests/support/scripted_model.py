# SPDX-License-Identifier: Apache-2.0
"""A model that answers with a text chosen by the test, and a chat template for it."""

from __future__ import annotations

import torch

from megatron.core.context_parallel import SequenceLayout
from tests.support.http_server import END, NextByte

#: Renders every field of a conversation.
TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}[{{ m.role }} {{ m.content }}"
    "{% if m.reasoning_content %} thought {{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls %} called {{ c.function.name }}"
    " {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}]{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


class Scripted(NextByte):
    """Answers any prompt with a fixed text, for one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = b""

    def say(self, text: str) -> None:
        """Set the text of the next answer."""
        self._bytes = text.encode()

    def __call__(
        self, tokens: torch.Tensor, *, layout: SequenceLayout, **context: object
    ) -> torch.Tensor:
        self.gate.wait()
        self.before()
        assert self.engine is not None
        (row,) = self.engine.scheduler.running
        # END follows the text, and fills any further positions.
        token_ids = torch.tensor([*self._bytes, END])
        indices = (layout.positions + 1 - row.num_prompt_tokens).clamp(0, len(token_ids) - 1)
        return 5 * torch.nn.functional.one_hot(token_ids[indices], END + 1).float()[:, None]
