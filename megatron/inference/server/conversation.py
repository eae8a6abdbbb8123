# SPDX-License-Identifier: Apache-2.0
"""A conversation as the prompt that the model's template makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.cli.tokenizers import Tokenizer
from megatron.inference.server.guard import ApiError
from megatron.training.data.chat import END_MARK, ChatTemplate, TemplateRefusal
from megatron.training.data.template_process import GENERATION_MARKS


class Conversations:
    """Render conversations by the server's own template; none ever comes from a request.

    Args:
        template: None where the model has none.
        tokenizer: of the model.
    """

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer

    async def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, with what opens an answer.

        Raises:
            ApiError: there is no template, or it cannot render these messages.
        """
        if self._template is None:
            raise ApiError(
                400,
                "the model has no chat template: start the server with --chat-template, or use "
                "/v1/completions",
            )
        for place, message in enumerate(messages):
            if any(mark in message["content"] for mark in (END_MARK, *GENERATION_MARKS)):
                raise ApiError(
                    400,
                    f"messages.{place}: U+E0F0 to U+E0F2 are reserved: leave them out",
                    param="messages",
                )
        try:
            # Its own process renders it, with limits of its own.
            text = await asyncio.to_thread(
                self._template.render, messages, add_generation_prompt=True
            )
        except TemplateRefusal as error:
            # What the template's author says of messages; no text of an exception of ours.
            raise ApiError(
                400, f"the chat template refuses the messages: {error}", param="messages"
            ) from None
        except ValueError:
            raise ApiError(
                400, "the chat template takes too long for these messages", param="messages"
            ) from None
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a rendered text, which holds its special tokens itself."""
        for mark in GENERATION_MARKS:
            text = text.replace(mark, "")
        found: list[int] = []
        for number, part in enumerate(text.split(END_MARK)):
            if number and self._tokenizer.eod is not None:
                found.append(self._tokenizer.eod)
            found += self._tokenizer.tokenize(part, add_special_tokens=False) if part else []
        return found
