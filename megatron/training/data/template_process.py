# SPDX-License-Identifier: Apache-2.0
"""The process that compiles and renders a chat template: run as a file, with `python -I -S`.

It imports only the standard library and jinja2, so that the limit on its address space is available
to the template. It has limits on memory and CPU time, cannot open files or start processes, and
exits with its parent. This is the only module that imports `jinja2`.

Each frame is a length and JSON, sent over the socket that is standard input:

    the template    {"source", "special_tokens", "cpu_seconds", "memory_bytes"}, after
                    {"ready": true}; the answer is {} or a fault
    conversations   their number, then a frame for each: {"messages", "prompt", "prefixes"}, and
                    optionally "tools" and "variables"; the answer to each is {"text", "prefixes"}
                    or a fault

A fault is {"fault": kind, "text": reason}; kind is "error" (of the template), "memory" or "time". A
prefix is (number of messages, whether to add the generation prompt); the answer is the prefix's
length if the text of the whole conversation starts with it, else null.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

#: Surround the text in `{% generation %}` blocks; removed before the text is tokenized.
GENERATION_MARKS = ("\ue0f1", "\ue0f2")
#: Exit code of a process that has no memory left for an answer.
OUT_OF_MEMORY = 12
LENGTH = struct.Struct("<I")
#: Longest frame, for requests and answers.
MAX_FRAME_BYTES = 128 << 20

_MAX_PRODUCT_LENGTH = 1 << 20
# Longest rendered text: a constant plus a multiple of the request's bytes.
_TEXT_BYTES, _TEXT_BYTES_PER_BYTE = 1 << 20, 16
_MAX_REASON_LENGTH = 300
# CPU time between SIGPROF, which Python handles, and SIGXCPU, which ends the process.
_GRACE_SECONDS = 1.0
_POLL_SECONDS = 1.0


def main() -> NoReturn:
    """Serve one template until the parent has exited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = os.getppid()
    sys.path += sys.argv[1:]
    compile_template = _environment()
    try:
        _send({"ready": True})
        request = json.loads(_read_frame(parent).decode("utf-8", "surrogatepass"))
        _limit_resources(request["memory_bytes"])
        seconds, tokens = request["cpu_seconds"], request["special_tokens"]
        template = None

        def compiled() -> Mapping[str, Any]:
            nonlocal template
            template = compile_template(request["source"])
            return {}

        _send(_run_limited(compiled, seconds))
        while True:
            (count,) = LENGTH.unpack(_read_exactly(LENGTH.size, parent))
            for frame in [_read_frame(parent) for _ in range(count)]:
                _send(_run_limited(lambda frame=frame: _render(template, frame, tokens), seconds))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except OSError:
        os._exit(0)  # the parent has exited


def _render(template: Any, frame: bytes, tokens: Mapping[str, str]) -> Mapping[str, Any]:
    request = json.loads(frame.decode("utf-8", "surrogatepass"))
    messages = request["messages"]

    def render(count: int, prompt: bool) -> str:
        return template.render(
            messages=messages[:count],
            **{
                **request.get("variables", {}),
                **tokens,
                "add_generation_prompt": prompt,
                "tools": request.get("tools"),
                "documents": None,
            },
        )

    text = render(len(messages), request["prompt"])
    limit = min(_TEXT_BYTES + _TEXT_BYTES_PER_BYTE * len(frame), MAX_FRAME_BYTES // 8)
    if len(text) > limit:
        raise ValueError(f"it renders {len(text)} characters from {len(frame)} input bytes")
    lengths = []
    for count, prompt in request["prefixes"]:
        prefix = render(count, prompt)
        lengths.append(len(prefix) if text.startswith(prefix) else None)
    return {"text": text, "prefixes": lengths}


def _run_limited(work: Callable[[], Mapping[str, Any]], seconds: float) -> Mapping[str, Any]:
    """Call `work` with a CPU time limit; return its answer or a fault."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft_limit = math.ceil(time.process_time() + seconds + _GRACE_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (_capped(soft_limit, hard), hard))
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return work()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except Exception as error:  # a template can raise anything
        kinds = {MemoryError: "memory", TimeoutError: "time"}
        kind = next(
            (name for error_type, name in kinds.items() if isinstance(error, error_type)), "error"
        )
        line = _template_line(error)
        error.__traceback__ = None  # frees the memory that its frames refer to
        reason = str(error) if kind == "error" else ""
        if isinstance(error, RecursionError):
            reason = "it recurses too deep"
        reason = reason if reason or kind != "error" else type(error).__name__
    printable = "".join(c if c.isprintable() else " " for c in reason[: 4 * _MAX_REASON_LENGTH])
    text = " ".join(printable.split())[:_MAX_REASON_LENGTH]
    location = "" if line is None else f"line {line}"
    return {
        "fault": kind,
        "text": f"{text} ({location})" if text and location else text or location,
    }


def _template_line(error: BaseException) -> int | None:
    """Return the line of the template that raised an error."""
    line = getattr(error, "lineno", None)
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _expire(number: int, frame: object) -> None:
    raise TimeoutError


def _limit_resources(memory_bytes: int) -> None:
    """Limit the memory of this process, and forbid files, further modules and processes."""
    signal.signal(signal.SIGPROF, _expire)
    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_AS, used + memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        hard = _capped(limit, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (hard, hard))
    # Without finders, importing a module that is not loaded raises ImportError instead of failing
    # to open its file. Warnings are off, because printing one imports modules.
    sys.meta_path.clear()
    warnings.simplefilter("ignore")


def _capped(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _send(answer: Mapping[str, Any]) -> None:
    data = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    remaining = memoryview(LENGTH.pack(len(data)) + data)
    while remaining:
        remaining = remaining[os.write(0, remaining) :]


def _read_frame(parent: int) -> bytes:
    (length,) = LENGTH.unpack(_read_exactly(LENGTH.size, parent))
    return _read_exactly(length, parent)


def _read_exactly(count: int, parent: int) -> bytes:
    """Read exactly `count` bytes; exit if the parent has exited.

    A process forked by the parent may keep the other end of the socket open, so the parent's exit
    does not always close the socket.
    """
    data = bytearray()
    while len(data) < count:
        while not select.select([0], [], [], _POLL_SECONDS)[0]:
            if os.getppid() != parent:
                os._exit(0)
        chunk = os.read(0, min(count - len(data), 1 << 20))
        if not chunk:
            os._exit(0)
        data += chunk
    return bytes(data)


def _environment() -> Callable[[str], Any]:
    """Return a function that compiles a template with the settings of `transformers`."""
    # Import everything that templates need now: later the process cannot open files.
    import codecs
    import html  # noqa: F401 - used by the filter striptags
    import pprint  # noqa: F401 - used by the filter pprint
    import textwrap  # noqa: F401 - used by the filter wordwrap
    import unicodedata  # noqa: F401 - used by "\\N{BULLET}" in templates

    import jinja2.debug  # noqa: F401 - rewrites tracebacks to template lines
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`: surround the block's text with marks."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return GENERATION_MARKS[0] + caller() + GENERATION_MARKS[1]

    class Sandbox(ImmutableSandboxedEnvironment):
        """A sandbox that also refuses powers and huge repetitions, which exhaust memory."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise TemplateError("powers are not allowed")
            for text, times in ((left, right), (right, left)):
                sized = hasattr(text, "__len__") and isinstance(times, int)
                if sized and len(text) * times > _MAX_PRODUCT_LENGTH:
                    raise TemplateError(f"a product of {len(text)} x {times} elements")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    del (
        environment.filters["random"],
        environment.globals["lipsum"],
    )  # rendering must be deterministic
    for name in ("ascii", "latin-1", "utf-8", "utf-16", "utf-32", "unicode-escape"):
        codecs.lookup(name)
    return environment.from_string


if __name__ == "__main__":
    main()
