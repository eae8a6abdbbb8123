# SPDX-License-Identifier: Apache-2.0
r"""Serve a trained model over HTTP with OpenAI's routes: `python -m megatron.inference.serve ...`.

    python -m megatron.inference.serve --load runs/quickstart/checkpoints --chat-template chatml
    curl -s localhost:8000/v1/completions -d '{"prompt": "The list type", "max_tokens": 20}'

This process runs the engine and starts a second process for the HTTP routes, see
`megatron.inference.server`. Under torchrun each replica of the model has tensor-parallel size times
pipeline-parallel size ranks, and replicas are data parallel; clients connect to rank 0.
After SIGTERM or Ctrl-C the server admits no requests, finishes the running ones and exits with 0; a
second signal ends it at once.

It needs the extra `serve`: pip install 'megatron-lm[serve]'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron.cli.error_reports import ErrorReports
from megatron.cli.errors import ExitCode, RunStopped, run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.launch import Launch
from megatron.cli.standard_streams import run_command
from megatron.cli.tokenizers import pair_tokens
from megatron.core.untrusted_files import read_named
from megatron.inference.config import Inference, ModelSource, Speculation, check, start_facts
from megatron.inference.server.tool_parsers.formats import (
    ReasoningParserName,
    ToolParserName,
    check_parsers,
    select_parsers,
)

if TYPE_CHECKING:
    from megatron.core.inference.router import Replicas
    from megatron.hf.classifier import Classifier
    from megatron.inference.checkpoint_model import CheckpointModel
    from megatron.inference.server.engine.embedder import Embedder, Pooling

PROG = "python -m megatron.inference.serve"

_REQUIRED_MODULES = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "jinja2")
_HTTP_PROCESS = "megatron.inference.server.http_process"
_MAX_KEY_BYTES = 4096
_PARSER_FLAGS = ("--tool-call-parser", "--reasoning-parser")
# How long the HTTP process may take to exit after its link is closed.
_EXIT_SECONDS = 60.0


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
    served_model_name: tuple[str, ...] | None = None
    """Names of the model for clients; responses have the first; derived: the name of the folder of
    --load."""
    allowed_origins: tuple[str, ...] | None = None
    """Origins of web pages that may send requests, such as https://chat.example.org, or * for all;
    derived: only the server's own page."""
    chat_template: str | None = None
    """Chat template: a Jinja file, or chatml, llama3 or plain; derived: the template of the
    tokenizer's folder. Without a template there are no chat routes. With a classification head it
    renders the pairs to score, as messages of the roles query and document."""
    tool_call_parser: ToolParserName | None = None
    """Format of tool calls: hermes is JSON in <tool_call>, also for Qwen2.5 and Qwen3; qwen3_coder
    is XML, also for Qwen3.5 and Nemotron 3; auto selects by the chat template; derived: requests
    with tools are refused."""
    reasoning_parser: ReasoningParserName | None = None
    """Marks around reasoning: [THINK] for mistral, channels for gpt_oss, sentences for granite,
    <think> for the other values; auto selects by the chat template; derived: reasoning is part of
    the text."""
    chat_template_kwargs: tuple[str, ...] | None = None
    """Variables of the chat template that requests may set, such as enable_thinking."""
    max_queue: int = 64
    """Maximum number of outputs in the queue, in addition to --inference-max-requests running
    outputs; requests beyond are refused with 429."""
    max_body_mb: float = 8.0
    """Largest request body, in units of 1e6 bytes."""
    max_unsent_tokens: int = 4096
    """Maximum number of unread tokens of a slow client; beyond it, its stream is dropped."""
    response_store_mb: float = 0.0
    """Memory for stored responses of /v1/responses, in units of 1e6 bytes; the oldest are evicted
    first; 0 stores nothing."""
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
    log_level: Literal["info", "warning", "error"] = "info"
    """Least severe messages of the HTTP process's log; warning drops the line per response."""
    strict_fields: bool = False
    """Refuse requests with a field that the server does not know, instead of ignoring the field
    and naming it in the header x-ignored-fields."""


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
        check_parsers(service.tool_call_parser, service.reasoning_parser)
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
        if service.response_store_mb < 0:
            raise ValueError(
                f"--response-store-mb is {service.response_store_mb}: it must not be negative"
            )
        if service.max_queue < 0:
            raise ValueError(f"--max-queue is {service.max_queue}: it must not be negative")
        for name, port in (("port", service.port), ("admin-port", service.admin_port or 0)):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"--{name} is {port}: use 0 to 65535")
        if service.admin_port is None and service.admin_key_file is not None:
            raise ValueError("--admin-key-file needs --admin-port: give --admin-port as well")


def check_extra() -> None:
    """Raise ValueError if the extra `serve` is not installed."""
    missing = [name for name in _REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}: pip install 'megatron-lm[serve]'")


def read_keys(service: Service) -> tuple[str | None, str | None]:
    """Return the API key (None without authentication) and the admin key (None without admin port).

    Raises:
        ValueError: a key file is invalid, or the server accepts remote connections without a key.
    """
    key = read_key(service)
    if service.admin_port is None:
        return key, None
    if service.admin_key_file is None:
        raise ValueError(f"--admin-port {service.admin_port} needs an --admin-key-file")
    admin_key = _read_key_file("--admin-key-file", service.admin_key_file)
    if admin_key == key:
        raise ValueError(
            "--admin-key-file and --api-key-file contain the same key: use different keys"
        )
    return key, admin_key


def read_key(service: Service) -> str | None:
    """Return the API key; None without authentication.

    Raises:
        ValueError: the key file is invalid, or the server accepts remote connections without a key.
    """
    path = service.api_key_file
    if path is None:
        if not _is_loopback(service.host):
            raise ValueError(
                f"--host {service.host} is open to other machines: give --api-key-file, or listen "
                "on 127.0.0.1"
            )
        return None
    return _read_key_file("--api-key-file", path)


def _read_key_file(flag: str, path: str) -> str:
    """Return the key in a file. Raises ValueError, which names the flag."""
    try:
        key = read_named(path, _MAX_KEY_BYTES).strip()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{flag} {path}: write one key into it, in printable ASCII without blanks")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int, *, flags: str = "") -> socket.socket:
    """Return a listening socket.

    Args:
        host, port: address to bind.
        flags: prefix of the flags in error messages, such as "admin-".

    Raises:
        ValueError: the address cannot be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"cannot listen on --{flags}host {host} --{flags}port {port}: {error.strerror or error}"
        ) from None


@contextlib.contextmanager
def http_process(listeners: Sequence[socket.socket]) -> Iterator[tuple[socket.socket, int]]:
    """Start the HTTP process; yield the link to it and its process id.

    The process exits when the link closes.

    Args:
        listeners: listening sockets of the API and, optionally, of administration.
    """
    link, child_end = socket.socketpair()
    descriptors = [child_end.fileno(), *(listener.fileno() for listener in listeners)]
    with link:
        with child_end:
            process = subprocess.Popen(
                [sys.executable, "-m", _HTTP_PROCESS, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
            )
        try:
            yield link, process.pid
        finally:
            link.close()
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode:
        raise RunStopped(ExitCode.CRASH, f"error: the HTTP process ended ({process.returncode})")


def pooling_of(loaded: CheckpointModel) -> Pooling | str:
    """Return the pooling of the model's embeddings or of its classification head, or why the model
    has no pooling. Raises ValueError for an invalid field of config.json."""
    from megatron.inference.server.engine.embedder import NoPooling, Pooling, read_pooling

    if (classifier := classifier_of(loaded)) is not None:
        return Pooling(tokens="last", normalize=False, padding_token=classifier.padding_token)
    try:
        return read_pooling(loaded.folder)
    except NoPooling as error:
        return str(error)


def no_embeddings(loaded: CheckpointModel) -> str | None:
    """Return why the model has no embeddings; None if it has them."""
    if classifier_of(loaded) is not None:
        return "it has a classification head: use /score, /rerank or /classify"
    pooling = pooling_of(loaded)
    return pooling if isinstance(pooling, str) else None


def classifier_of(loaded: CheckpointModel) -> Classifier | None:
    """Return how to read the outputs of the classification head; None without one. Raises
    ValueError for an invalid field of config.json."""
    from megatron.hf.classifier import read_classifier

    num_labels = loaded.model.config.num_labels
    return None if num_labels is None else read_classifier(loaded.hf_folder, num_labels)


def classifier_settings(loaded: CheckpointModel, service: Service) -> dict[str, Any] | None:
    """Return the settings of the HTTP process about the classification head; None without one."""
    classifier = classifier_of(loaded)
    if classifier is None:
        return None
    pair = pair_tokens(loaded.tokenizer)
    return {
        "head": dataclasses.asdict(classifier),
        "pair_tokens": dataclasses.asdict(pair),
        # The template of a folder is for chats.
        "has_score_template": service.chat_template is not None,
    }


def make_embedder(
    loaded: CheckpointModel, config: ServeConfig, replicas: Replicas
) -> Embedder | None:
    """Return the embedder, which also computes class outputs; None if the model has no pooling."""
    from megatron.inference.server.engine.embedder import Embedder

    pooling = pooling_of(loaded)
    if isinstance(pooling, str):
        return None
    return Embedder(
        loaded.model,
        pooling,
        loaded.device,
        max_tokens=config.inference.inference_max_tokens,
        token_multiple=loaded.token_multiple,
        link=replicas.engine.link,
    )


def check_template(service: Service, source: str, name: str) -> None:
    """Raise ValueError for options that set a variable which the chat template does not read.

    Args:
        service: options of the server.
        source: Jinja source of the template.
        name: name of the template in error messages.
    """
    unread = [f"--chat-template-kwargs {n}" for n in service.chat_template_kwargs or ()]
    unread = [option for option in unread if option.split()[-1] not in source]
    if service.tool_call_parser is not None and "tools" not in source:
        unread.append(f"--tool-call-parser {service.tool_call_parser}")
    if unread:
        raise ValueError(
            f"{', '.join(unread)}: {name} does not use these variables, so they would have no "
            "effect: give a --chat-template that does, or leave the option out"
        )


def http_settings(
    loaded: CheckpointModel, config: ServeConfig, keys: Sequence[str | None]
) -> dict[str, Any]:
    """Return the settings, which are the first message to the HTTP process.

    Raises:
        ValueError: `--chat-template` is invalid, or does not read a variable of another option.
    """
    from megatron.training.data.chat import has_chat_template, read_chat_template

    service, template = config.service, None
    if service.chat_template is not None or has_chat_template(loaded.chat_folder):
        with contextlib.closing(
            read_chat_template(service.chat_template, tokenizer_model=loaded.chat_folder)
        ) as chat_template:
            template = {
                "source": chat_template.source,
                "special_tokens": chat_template.special_tokens,
                "name": chat_template.name,
            }
            check_template(service, chat_template.source, chat_template.name)
    options = (service.tool_call_parser, service.reasoning_parser)
    parsers = select_parsers(*options, None if template is None else template["source"])
    if "auto" in options:
        names = " ".join(
            f"{flag} {name}" for flag, name in zip(_PARSER_FLAGS, parsers, strict=True) if name
        )
        print(f"selected parsers: {names}", file=sys.stderr, flush=True)
    names = service.served_model_name or (Path(config.source.load).resolve().name,)
    return {
        "kind": "settings",
        "key": keys[0],
        "admin_key": keys[1],
        "tokenizer": loaded.tokenizer_choice,
        "template": template,
        "template_variables": list(service.chat_template_kwargs or ()),
        "no_embeddings": no_embeddings(loaded),
        "classifier": classifier_settings(loaded, service),
        "formats": dict(zip(("tools", "reasoning"), parsers, strict=True)),
        "card": {
            "name": names[0],
            "aliases": names[1:],
            "vocab_size": loaded.vocab_size,
            "max_length": loaded.max_length,
            "stop_tokens": sorted(loaded.stop_tokens),
            "created": int(time.time()),
        },
        "limits": {
            "max_body_bytes": int(service.max_body_mb * 1e6),
            "body_seconds": service.body_timeout_seconds,
            "request_seconds": service.request_timeout_seconds,
        },
        "client": {
            "max_outputs": service.max_queue
            + loaded.data_parallel.size * config.inference.inference_max_requests,
            "max_unsent": service.max_unsent_tokens,
        },
        "drain_seconds": service.drain_timeout_seconds,
        "log_format": service.log_format,
        "log_level": service.log_level,
        "strict_fields": service.strict_fields,
        "response_store_bytes": int(service.response_store_mb * 1e6),
        "allowed_origins": list(service.allowed_origins or ()),
    }


def model_facts(loaded: CheckpointModel) -> dict[str, Any]:
    """Return facts about a model for `/health`, which needs no key: no paths and no names."""
    groups = loaded.model.groups
    return {
        "dtype": str(loaded.model.store.dtype).removeprefix("torch."),
        "tensor_parallel": groups["tp"].size,
        "pipeline_parallel": groups["pp"].size,
        "data_parallel": groups["dp"].size,
        "expert_parallel": groups["ep"].size,
        "transformer_impl": "inference_optimized" if loaded.optimized else "local",
        "weights_dtype": loaded.copy_dtype or "stored",
        "speculative_method": loaded.speculation.speculative_method,
        "max_model_len": loaded.max_length,
    }


def run(
    config: ServeConfig, launch: Launch, reports: ErrorReports, stack: contextlib.ExitStack
) -> None:
    """Load the model and serve it until a signal ends the server.

    Args:
        config: options of the server.
        launch: rank and world size of this process.
        reports: agrees with the other ranks on errors.
        stack: collects the sockets and the HTTP process. Closing it waits for the exit of the HTTP
            process, which may take seconds.

    Raises:
        ValueError: anything the user can fix.
    """
    check_extra()
    service = config.service
    keys = read_keys(service)
    link, addresses = None, []
    if launch.rank == 0:
        listeners = [stack.enter_context(listen(service.host, service.port))]
        if service.admin_port is not None:
            admin_listener = listen(service.admin_host, service.admin_port, flags="admin-")
            listeners.append(stack.enter_context(admin_listener))
        addresses = [listener.getsockname()[:2] for listener in listeners]
        link, _ = stack.enter_context(http_process(listeners))
        for listener in listeners:
            listener.close()  # the HTTP process has inherited it
    serve(config, launch, link, keys=keys, addresses=addresses, reports=reports)


def serve(
    config: ServeConfig,
    launch: Launch,
    link: socket.socket | None,
    *,
    keys: Sequence[str | None],
    addresses: Sequence[tuple[str, int]],
    reports: ErrorReports | None = None,
) -> None:
    """Run the engine of this rank for the HTTP process.

    Args:
        config: options of the server.
        launch: rank and world size of this process.
        link: socket to the HTTP process; None on all ranks but 0.
        keys: API key and admin key.
        addresses: host and port of the API and of administration, on rank 0.
        reports: agrees with the other ranks on errors.
    """
    from megatron.inference.generate import describe_replicas
    from megatron.inference.llm import LLM
    from megatron.inference.load_model import load_checkpoint_model
    from megatron.inference.server.engine.control import EngineControl
    from megatron.inference.server.engine.link import frame
    from megatron.inference.server.engine.loop import EngineLoop
    from megatron.inference.server.guided_decoding.grammars import grammars_of

    with load_checkpoint_model(
        config.source,
        launch,
        speculation=config.speculation,
        facts=start_facts(config),
        reports=reports,
        allow_classifier=True,
    ) as loaded:
        if link is not None:
            link.sendall(frame(http_settings(loaded, config, keys)))
        replicas = LLM(loaded, config.inference).replicas
        grammars = grammars_of(loaded.tokenizer, sorted(loaded.stop_tokens), loaded.vocab_size)
        loop = EngineLoop(
            replicas,
            link,
            loaded.host_group(),
            grammars=grammars,
            embedder=make_embedder(loaded, config, replicas),
            model_facts=model_facts(loaded),
            control=EngineControl(replicas, loaded),
        )

        def end(signal_number: int, stack_frame: object) -> None:
            loop.drain()
            signal.signal(signal_number, signal.SIG_DFL)

        for signal_number in (signal.SIGTERM, signal.SIGINT):
            # Only rank 0 handles the signal; its loop sends the end to the other ranks.
            signal.signal(signal_number, end if link is not None else signal.SIG_IGN)
        for service_name, (host, port) in zip(
            (str(loaded.folder), "administration"), addresses, strict=False
        ):
            bracketed_host = f"[{host}]" if ":" in host else host
            print(
                f"serving {service_name} at http://{bracketed_host}:{port}",
                file=sys.stderr,
                flush=True,
            )
        loop.run()
        if link is not None:
            print(f"served {describe_replicas(replicas)}", file=sys.stderr, flush=True)


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return this process's exit code.

    Args:
        argv: arguments without the program's name.
        environment: environment variables, in which torchrun passes the rank.
    """
    reports = ErrorReports(environment)

    stack = contextlib.ExitStack()

    def served() -> None:
        line = parse_command_line(
            ServeConfig, argv, prog=PROG, description="Serve a trained model over HTTP."
        )
        run(line.config, Launch.from_environment(environment), reports, stack)
        stack.close()

    code = run_entry_point(served, prog=PROG, report=reports.report)
    # Close after the error is printed: the exit of the HTTP process may take seconds.
    with contextlib.suppress(RunStopped):
        stack.close()
    return code


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], os.environ))
