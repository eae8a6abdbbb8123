# SPDX-License-Identifier: Apache-2.0
"""The process that compiles and renders a chat template: run as a file, with `python -I -S`.

It imports the standard library and jinja2 only, so that a limit on its address space leaves room
for nothing but the template's work. It has limits on memory and CPU time, opens no file, starts no
process, and ends with its parent. This is the one module that imports the library `jinja2`.

Frames are a length and JSON, over the socket that is its standard input:

    the template    {"source", "special_tokens", "cpu_seconds", "memory_bytes"}, after
                    {"ready": true}; answered with {} or a fault
    conversations   their number, then a frame of each: {"messages", "prompt", "prefixes"}, and
                    "tools" and "variables" of the template if there are any; answered, each, with
                    {"text", "prefixes"} or a fault

A fault is {"fault": kind, "text": reason}: "error" of the template, or "memory", "time". A prefix
is (number of messages, whether with the generation prompt); its answer is its length if the text of
the whole conversation begins with it, else null.
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

#: Around what `{% generation %}` marks; taken out again before anybody sees the text.
GENERATION_MARKS = ("\ue0f1", "\ue0f2")
#: What the process exits with when there is no memory left to say so.
OUT_OF_MEMORY = 12
LENGTH = struct.Struct("<I")
#: The longest frame, of a conversation and of its text.
MAX_FRAME_BYTES = 128 << 20

_LARGEST_PRODUCT = 1 << 20
# A rendering may have so many bytes, and so many more for each of its conversation's JSON.
_TEXT_BYTES, _TEXT_BYTES_PER_BYTE = 1 << 20, 16
_LONGEST_REASON = 300
# CPU time between the signal that Python handles and the one that ends the process.
_GRACE_SECONDS = 1.0
_SECONDS_BETWEEN_LOOKS = 1.0


def main() -> NoReturn:
    """Serve one template until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    parent = os.getppid()
    sys.path += sys.argv[1:]
    compile_template = _environment()
    try:
        _send({"ready": True})
        order = json.loads(_frame(parent).decode("utf-8", "surrogatepass"))
        _limit(order["memory_bytes"])
        seconds, tokens = order["cpu_seconds"], order["special_tokens"]
        template = None

        def compiled() -> Mapping[str, Any]:
            nonlocal template
            template = compile_template(order["source"])
            return {}

        _send(_outcome(compiled, seconds))
        while True:
            (count,) = LENGTH.unpack(_exactly(LENGTH.size, parent))
            for frame in [_frame(parent) for _ in range(count)]:
                _send(_outcome(lambda frame=frame: _rendered(template, frame, tokens), seconds))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except OSError:
        os._exit(0)  # the parent is gone


def _rendered(template: Any, frame: bytes, tokens: Mapping[str, str]) -> Mapping[str, Any]:
    order = json.loads(frame.decode("utf-8", "surrogatepass"))
    messages = order["messages"]

    def render(count: int, prompt: bool) -> str:
        return template.render(
            messages=messages[:count],
            **{
                **order.get("variables", {}),
                **tokens,
                "add_generation_prompt": prompt,
                "tools": order.get("tools"),
                "documents": None,
            },
        )

    text = render(len(messages), order["prompt"])
    most = min(_TEXT_BYTES + _TEXT_BYTES_PER_BYTE * len(frame), MAX_FRAME_BYTES // 8)
    if len(text) > most:
        raise ValueError(f"it makes {len(text)} characters of a conversation of {len(frame)} bytes")
    lengths = []
    for count, prompt in order["prefixes"]:
        begin = render(count, prompt)
        lengths.append(len(begin) if text.startswith(begin) else None)
    return {"text": text, "prefixes": lengths}


def _outcome(work: Callable[[], Mapping[str, Any]], seconds: float) -> Mapping[str, Any]:
    """Do some work of the template within its CPU time; return its result or its fault."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    end = math.ceil(time.process_time() + seconds + _GRACE_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (_within(end, hard), hard))
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return work()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except Exception as error:  # whatever a template can cause
        kinds = {MemoryError: "memory", TimeoutError: "time"}
        kind = next((k for of, k in kinds.items() if isinstance(error, of)), "error")
        line = _line(error)
        error.__traceback__ = None  # frees what its frames hold
        reason = str(error) if kind == "error" else ""
        if isinstance(error, RecursionError):
            reason = "it recurses too deep"
        reason = reason if reason or kind != "error" else type(error).__name__
    printable = "".join(c if c.isprintable() else " " for c in reason[: 4 * _LONGEST_REASON])
    text = " ".join(printable.split())[:_LONGEST_REASON]
    place = "" if line is None else f"line {line}"
    return {"fault": kind, "text": f"{text} ({place})" if text and place else text or place}


def _line(error: BaseException) -> int | None:
    """Return the template's line at which an error was raised."""
    line = getattr(error, "lineno", None)
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _expire(number: int, frame: object) -> None:
    raise TimeoutError


def _limit(memory_bytes: int) -> None:
    """Leave this process so much more memory, and no way to files, modules and processes."""
    signal.signal(signal.SIGPROF, _expire)
    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, used + memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        hard = _within(most, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (hard, hard))
    # A module that is not loaded is unknown, rather than a file that cannot be opened; a warning
    # would load modules to show the line that it is about.
    sys.meta_path.clear()
    warnings.simplefilter("ignore")


def _within(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def _send(answer: Mapping[str, Any]) -> None:
    data = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    rest = memoryview(LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(0, rest) :]


def _frame(parent: int) -> bytes:
    (length,) = LENGTH.unpack(_exactly(LENGTH.size, parent))
    return _exactly(length, parent)


def _exactly(count: int, parent: int) -> bytes:
    """Read so many bytes; end when the parent has ended, even if the other end is still open.

    A process that the parent forked holds that end too.
    """
    data = bytearray()
    while len(data) < count:
        while not select.select([0], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
            if os.getppid() != parent:
                os._exit(0)
        found = os.read(0, min(count - len(data), 1 << 20))
        if not found:
            os._exit(0)
        data += found
    return bytes(data)


def _environment() -> Callable[[str], Any]:
    """Return what compiles a template, with the settings of `transformers`."""
    # What templates need is imported here: there is no file to import it from later.
    import codecs
    import html  # noqa: F401 - for the filter striptags
    import pprint  # noqa: F401 - for the filter of that name
    import textwrap  # noqa: F401 - for the filter wordwrap
    import unicodedata  # noqa: F401 - for characters by name in texts, "\\N{BULLET}"

    import jinja2.debug  # noqa: F401 - what gives errors their lines
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`: put marks around what stands inside."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return GENERATION_MARKS[0] + caller() + GENERATION_MARKS[1]

    class Sandbox(ImmutableSandboxedEnvironment):
        """Also refuses products that are there to fill the memory."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise TemplateError("powers are not allowed")
            for text, times in ((left, right), (right, left)):
                sized = hasattr(text, "__len__") and isinstance(times, int)
                if sized and len(text) * times > _LARGEST_PRODUCT:
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
    del environment.filters["random"], environment.globals["lipsum"]  # a text is always the same
    for name in ("ascii", "latin-1", "utf-8", "utf-16", "utf-32", "unicode-escape"):
        codecs.lookup(name)
    return environment.from_string


if __name__ == "__main__":
    main()
