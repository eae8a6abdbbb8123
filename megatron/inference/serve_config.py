# SPDX-License-Identifier: Apache-2.0
"""The options of `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.inference.config import Inference, ModelSource, Speculation, check

#: Variables of a chat template that hold the conversation; requests cannot set them.
TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True, kw_only=True)
class Service:
    """Addresses, keys, formats and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen on; an address that other machines reach needs --api-key-file."""
    port: int = 8000
    """Port to listen on; 0 selects a free port and logs it."""
    api_key_file: str | None = None
    """File with the API key, which every route except / and /health requires."""
    served_model_name: str | None = None
    """Name of the model for clients; derived: the name of the folder of --load."""
    chat_template: str | None = None
    """Chat template: a Jinja file, or chatml, llama3 or plain; derived: the template of the
    tokenizer's folder. Without a template there are no chat routes."""
    tool_call_parser: (
        Literal["hermes", "qwen3_coder", "llama3_json", "deepseek_v3", "nemotron"] | None
    ) = None
    """Format of tool calls: hermes is JSON in <tool_call>, also for Qwen2.5 and Qwen3; qwen3_coder
    is XML, also for Nemotron 3; derived: requests with tools are refused."""
    reasoning_parser: Literal["qwen3", "deepseek_r1", "nemotron", "mistral"] | None = None
    """Tags around reasoning: [THINK] for mistral, <think> for the other values; derived: reasoning
    is part of the text."""
    chat_template_kwargs: tuple[str, ...] | None = None
    """Variables of the chat template that requests may set, such as enable_thinking."""
    max_queue: int = 64
    """Maximum number of outputs in the queue, in addition to --inference-max-requests running
    outputs; requests beyond are refused with 429."""
    max_body_mb: float = 8.0
    """Largest request body, in units of 1e6 bytes."""
    max_unsent_tokens: int = 4096
    """Maximum number of unread tokens of a slow client; beyond it, its stream is dropped."""
    body_timeout_seconds: float = 30.0
    """Time for a request's header, and then for its body, to arrive."""
    request_timeout_seconds: float = 600.0
    """Time for a response, including its time in the queue."""
    drain_timeout_seconds: float = 30.0
    """Time for running requests to finish after SIGTERM before they are aborted."""
    admin_port: int | None = None
    """Port for administration: pause, sleep, replace weights, profile; 0 selects a free port;
    derived: no administration."""
    admin_host: str = "127.0.0.1"
    """Address to listen on for administration."""
    admin_key_file: str | None = None
    """File with the admin key, which --admin-port requires."""
    log_format: Literal["text", "json"] = "text"
    """Format of the HTTP process's log on stderr, one line per response: text, or a JSON object
    with the request id."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """One server."""

    source: ModelSource
    service: Service
    inference: Inference
    speculation: Speculation

    def __post_init__(self) -> None:
        check(self.source, self.inference, self.speculation)
        service = self.service
        for variable in service.chat_template_kwargs or ():
            if not variable.isidentifier() or variable in TEMPLATE_ARGUMENTS:
                raise ValueError(
                    f"--chat-template-kwargs {variable}: requests may not set this variable"
                )
        for name, value in (
            ("max-body-mb", service.max_body_mb),
            ("max-unsent-tokens", service.max_unsent_tokens),
            ("body-timeout-seconds", service.body_timeout_seconds),
            ("request-timeout-seconds", service.request_timeout_seconds),
            ("drain-timeout-seconds", service.drain_timeout_seconds),
        ):
            if value <= 0:
                raise ValueError(f"--{name} is {value}: it must be above 0")
        if service.max_queue < 0:
            raise ValueError(f"--max-queue is {service.max_queue}: it must not be negative")
        for name, port in (("port", service.port), ("admin-port", service.admin_port or 0)):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"--{name} is {port}: use 0 to 65535")
        if service.admin_port is None and service.admin_key_file is not None:
            raise ValueError("--admin-key-file needs --admin-port: give --admin-port as well")
