# SPDX-License-Identifier: Apache-2.0
"""Answers with reasoning, text and tool calls, as the chat templates of model families write them.

`transformers` renders the templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from megatron.cli.tokenizers import ByteTokenizer
from megatron.inference.server.tool_parsers.formats import AnswerFormats, formats_of

FOLDER = Path(__file__).parents[1] / "unit_tests/inference/server/call_templates"
#: The tool parser and the reasoning parser for each template.
PARSERS: Mapping[str, tuple[str, str]] = {
    "qwen3": ("hermes", "qwen3"),
    "qwen3_5": ("qwen3_xml", "qwen3"),
    "mistral_v3": ("mistral", "mistral"),
    "mistral_v11": ("mistral", "mistral"),
    "mistral_v13": ("mistral", "mistral"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "glm45": ("glm4_5", "glm45"),
    "glm47": ("glm47", "glm45"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "gpt_oss_role": ("gpt_oss", "gpt_oss"),
    "minimax_m1": ("minimax", "qwen3"),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "deepseek_v31": ("deepseek_v31", "deepseek_v3"),
}
_END = "\ue000"


class Answer(NamedTuple):
    """The text of an answer, and whether its prompt ends inside reasoning."""

    text: str
    in_reasoning: bool


def formats(template: str) -> AnswerFormats:
    """Return the answer formats of a template's model."""
    return formats_of(*PARSERS[template], tokenizer=ByteTokenizer())


def render(
    template: str,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    text: str = "",
    reasoning: str = "",
) -> Answer:
    """Return an answer that a template renders.

    Args:
        template: name of the template.
        calls: name and arguments of each call.
        text, reasoning: text and reasoning before the calls.
    """
    answer_formats = formats(template)
    assert answer_formats.tools is not None
    assert answer_formats.reasoning is not None
    as_text = answer_formats.tools.text_arguments
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message[answer_formats.reasoning.message_key] = reasoning
    for index, (name, arguments) in enumerate(calls):
        call_id = f"functions.{name}:{index}" if template == "kimi_k2" else f"id{index:07}"
        written = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        call = {"id": call_id, "function": {"name": name, "arguments": written}}
        message.setdefault("tool_calls", []).append(call)
    file = FOLDER / f"{template.removesuffix('_role')}.jinja"
    conversation = [{"role": "user", "content": "Hi"}, message]
    variables = {
        "chat_template": file.read_text(encoding="utf-8"),
        "eos_token": _END,
        "recipient_in_role": template.endswith("_role"),
        "thinking": bool(reasoning),
    }
    prompt = render_jinja_template([conversation[:1]], add_generation_prompt=True, **variables)[0][
        0
    ]
    whole = render_jinja_template([conversation], **variables)[0][0]
    assert whole.startswith(prompt)
    assert whole.endswith(_END)
    in_reasoning = prompt.rstrip().endswith(answer_formats.reasoning.begin)
    return Answer(whole[len(prompt) : -1], in_reasoning)
