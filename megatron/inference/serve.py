# SPDX-License-Identifier: Apache-2.0
r"""Serve a trained model over HTTP, by OpenAI's routes: `python -m megatron.inference.serve ...`.

    python -m megatron.inference.serve --load runs/quickstart/checkpoints --chat-template chatml
    curl -s localhost:8000/v1/completions -d '{"prompt": "The list type", "max_tokens": 20}'

This process runs the engine; the HTTP routes run in another one that it starts, see
`megatron.inference.server`. `torchrun --nproc-per-node N` with `--tensor-model-parallel-size N`
shards the model; rank 0 is the one that clients reach. SIGTERM and Ctrl-C admit nothing more, let
running answers end, and exit with 0; a second signal ends at once.

It needs the extra `serve`: pip install 'megatron-lm[serve]'.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.errors import ExitCode, RunStopped, run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.launch import Launch
from megatron.cli.standard_streams import run_command
from megatron.core.untrusted_files import read_named
from megatron.inference.config import ServeConfig, Service

if TYPE_CHECKING:
    from megatron.inference.checkpoint_model import CheckpointModel

PROG = "python -m megatron.inference.serve"

_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "jinja2")
_HTTP_PROCESS = "megatron.inference.server.http_process"
_MAX_KEY_BYTES = 4096
# For the HTTP process to end after the link to it was closed.
_END_SECONDS = 60.0


def check_extra() -> None:
    """Raise ValueError if the extra `serve` is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}: pip install 'megatron-lm[serve]'")


def read_key(service: Service) -> str | None:
    """Return the API key, None where everybody may ask.

    Raises:
        ValueError: the file holds none, or there is none and others could reach the server.
    """
    path = service.api_key_file
    if path is None:
        if not _is_loopback(service.host):
            raise ValueError(
                f"--host {service.host} is open to other machines: give --api-key-file, or listen "
                "on 127.0.0.1"
            )
        return None
    try:
        key = read_named(path, _MAX_KEY_BYTES).strip()
    except OSError as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"--api-key-file {path}: write one key to it, printable ASCII, no blanks")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(service: Service) -> socket.socket:
    """Return a socket that listens. Raises ValueError if there can be none."""
    try:
        family = socket.getaddrinfo(service.host, service.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((service.host, service.port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"cannot listen on --host {service.host} --port {service.port}: "
            f"{error.strerror or error}"
        ) from None


@contextlib.contextmanager
def http_process(listener: socket.socket) -> Iterator[socket.socket]:
    """Start the HTTP process; yield the link to it, whose end ends it."""
    link, other_end = socket.socketpair()
    numbers = [other_end.fileno(), listener.fileno()]
    with link:
        with other_end:
            process = subprocess.Popen(
                [sys.executable, "-m", _HTTP_PROCESS, *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
            )
        try:
            yield link
        finally:
            link.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode:
        raise RunStopped(ExitCode.CRASH, f"error: the HTTP process ended ({process.returncode})")


def settings_of(loaded: CheckpointModel, config: ServeConfig, key: str | None) -> dict[str, Any]:
    """Return what the HTTP process is told first.

    Raises:
        ValueError: `--chat-template` is none.
    """
    from megatron.training.data.chat import has_chat_template, read_chat_template

    service = config.service
    template = None
    if service.chat_template is not None or has_chat_template(loaded.chat_folder):
        with contextlib.closing(
            read_chat_template(service.chat_template, tokenizer_model=loaded.chat_folder)
        ) as found:
            template = {
                "source": found.source,
                "special_tokens": found.special_tokens,
                "name": found.name,
            }
    return {
        "kind": "settings",
        "key": key,
        "tokenizer": loaded.tokenizer_choice,
        "template": template,
        "card": {
            "name": service.served_model_name or Path(config.source.load).resolve().name,
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
            "max_outputs": config.inference.inference_max_requests + service.max_queue,
            "max_unsent": service.max_unsent_tokens,
        },
        "drain_seconds": service.drain_timeout_seconds,
        "log_format": service.log_format,
    }


def explain(loaded: CheckpointModel) -> dict[str, Any]:
    """Return facts about a model for `/health`, which needs no key: no path and no name."""
    groups = loaded.model.groups
    return {
        "dtype": str(loaded.model.store.dtype).removeprefix("torch."),
        "tensor_parallel": groups["tp"].size,
        "expert_parallel": groups["ep"].size,
        "transformer_impl": "inference_optimized" if loaded.optimized else "local",
        "weights_dtype": loaded.weights_dtype,
        "speculative_method": loaded.speculation.speculative_method,
        "max_model_len": loaded.max_length,
    }


def run(config: ServeConfig, launch: Launch) -> None:
    """Load the model and serve it until a signal says to end.

    Raises:
        ValueError: anything the user can fix.
    """
    check_extra()
    size = config.source.tensor_model_parallel_size
    if launch.world_size != size:
        raise ValueError(
            f"--tensor-model-parallel-size {size} in {launch.world_size} processes: the server has "
            f"one replica; start {size} with torchrun --nproc-per-node, or several servers"
        )
    key = read_key(config.service)
    with contextlib.ExitStack() as stack:
        link, where = None, ()
        if launch.rank == 0:
            listener = stack.enter_context(listen(config.service))
            where = listener.getsockname()[:2]
            link = stack.enter_context(http_process(listener))
            listener.close()  # the other process has it
        serve(config, launch, link, key=key, where=where)


def serve(
    config: ServeConfig,
    launch: Launch,
    link: socket.socket | None,
    *,
    key: str | None,
    where: Sequence[Any],
) -> None:
    """Run the engine of this rank for the HTTP process.

    Args:
        config: what to serve.
        launch: which rank this is.
        link: to the HTTP process; None on ranks that follow.
        key: that clients must give.
        where: address and port that rank 0 listens on.
    """
    from megatron.inference.checkpoint_model import load_checkpoint_model
    from megatron.inference.llm import LLM
    from megatron.inference.server.engine_loop import EngineLoop, OrderBroadcast
    from megatron.inference.server.protocol import frame
    from megatron.inference.server.structured import grammars_of

    with load_checkpoint_model(config.source, launch, speculation=config.speculation) as loaded:
        if link is not None:
            link.sendall(frame(settings_of(loaded, config, key)))
        group = loaded.model.groups["tp"]
        engine = LLM(loaded, config.inference).engine
        grammars = grammars_of(loaded.tokenizer, sorted(loaded.stop_tokens), loaded.vocab_size)
        loop = EngineLoop(
            engine,
            link,
            OrderBroadcast(group, loaded.device),
            grammars=grammars,
            explained=explain(loaded),
        )

        def end(number: int, stack: object) -> None:
            loop.drain()
            signal.signal(number, signal.SIG_DFL)

        for number in (signal.SIGTERM, signal.SIGINT):
            # Rank 0 tells the others when to end.
            signal.signal(number, end if link is not None else signal.SIG_IGN)
        if link is not None:
            host, port = where
            shown = f"[{host}]" if ":" in host else host
            print(f"serving {loaded.folder} at http://{shown}:{port}", file=sys.stderr, flush=True)
        loop.run()


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return this process's exit code.

    Args:
        argv: arguments without the program's name.
        environment: of this process, where torchrun gives its rank.
    """
    speaks = environment.get("RANK", "0") == "0"

    def served() -> None:
        line = parse_command_line(
            ServeConfig, argv, prog=PROG, description="Serve a trained model over HTTP."
        )
        run(line.config, Launch.from_environment(environment))

    return run_entry_point(served, prog=PROG, claim=lambda text: speaks)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], os.environ))
