# SPDX-License-Identifier: Apache-2.0
"""A conversation as token ids and a loss mask: the assistant's turns, ends included.

The ids are those of the whole rendered text, as `transformers` gives them: special tokens such as
BOS are the template's to write, none are added. The characters of the assistant are either marked
by the template (`{% generation %}`) or found by rendering the conversation up to the turn with the
generation prompt, and with the turn: the text added counts in the loss, exactly what a model is
asked for at inference.

Chat templates come from a tokenizer's folder, a file or a built-in name. A template is Jinja text
as in Hugging Face tokenizers, with the same settings, so that its rendering is that of
`transformers`. It gets no clock: a text must not depend on the day. It is rendered in a sandboxed
process of its own, with limits on memory and time: see `template_process.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from megatron.cli.tokenizers import Tokenizer
from megatron.core.untrusted_files import read_json, read_text
from megatron.training.data import template_process
from megatron.training.data.template_process import (
    GENERATION_MARKS,
    LENGTH,
    MAX_FRAME_BYTES,
    OUT_OF_MEMORY,
)

__all__ = ["ChatTemplate", "MalformedConversation", "encode_conversations", "read_chat_template"]


#: Stands in a rendering for the end-of-document token of a tokenizer that has no text for it.
END_MARK = "\ue0f0"

_LARGEST_TEMPLATE_BYTES = 1 << 20
# Conversations are sent to the process in pieces of this size.
_BATCH_BYTES = 1 << 18
_START_SECONDS = 60.0
# What Python may need to be started; nothing else of the environment is a template's business.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
BUILT_IN: Mapping[str, str] = MappingProxyType({"chatml": CHATML, "llama3": LLAMA3, "plain": PLAIN})


class TemplateRefusal(Exception):
    """The template cannot render a conversation; the text is its reason."""


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """What a template may use, to be compiled and for each conversation."""

    cpu_seconds: float = 4.0
    """CPU time."""
    seconds: float = 10.0
    """Time on the clock."""
    memory_bytes: int = 768 << 20
    """Address space, beyond that of the process with jinja2 loaded."""


@dataclass(frozen=True)
class Prefix:
    """The first turns of a conversation, rendered on their own.

    Args:
        turns: how many.
        prompt: whether with what opens an answer.
    """

    turns: int
    prompt: bool


@dataclass(frozen=True)
class Rendering:
    """The text of a conversation.

    Args:
        text: with `GENERATION_MARKS` if the template sets them.
        lengths: of each prefix that was asked for, in characters; None where the text does not
            begin with it.
    """

    text: str
    lengths: tuple[int | None, ...]


class ChatTemplate:
    """A template, and the process that renders it, which starts when it is first needed.

    That process has nothing but jinja2 loaded, and limits: a template that loops, or asks for more
    memory than there is, ends with an error here. A forked process starts one of its own.

    Args:
        source: Jinja text.
        special_tokens: texts by name, such as `eos_token`; `END_MARK` where there is none.
        name: for messages.
        limits: what it may use.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        name: str = "chat template",
        limits: TemplateLimits | None = None,
    ) -> None:
        self.name, self.source = name, source
        self.special_tokens = {"bos_token": "", "eos_token": END_MARK, **(special_tokens or {})}
        self._limits = limits or TemplateLimits()
        self._process: _TemplateProcess | None = None
        self._owner, self._lock = os.getpid(), threading.Lock()

    @property
    def marks_generation(self) -> bool:
        """Return whether the template marks the assistant's text with `{% generation %}`."""
        return "generation %}" in self.source and "endgeneration" in self.source

    @property
    def fingerprint(self) -> str:
        """Return a digest that is equal for templates that render alike."""
        text = json.dumps([self.source, self.special_tokens], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def pid(self) -> int | None:
        """The process that renders, None if there is none."""
        with self._own():
            process = self._process
            return process.pid if process is not None and process.is_running else None

    def check(self) -> None:
        """Compile the template.

        Raises:
            ValueError: jinja2 is missing, or the text is no template.
        """
        with self._own():
            self._started()

    def close(self) -> None:
        """End the process that renders; it starts anew when it is needed."""
        with self._own():
            if self._process is not None:
                self._process.close()
                self._process = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, with `GENERATION_MARKS` if the template sets them.

        Args:
            messages: role and content of each turn.
            add_generation_prompt: end with what opens an answer.
            tools: that the model may call, in the shape of OpenAI.
            variables: more that the template knows, by name.

        Raises:
            TemplateRefusal: the template cannot render these messages.
            ValueError: the text is no template, or it takes too long, or too much memory.
        """
        more = {"tools": tools, "variables": variables}
        given = {name: value for name, value in more.items() if value}
        order = _order(messages, (), prompt=add_generation_prompt, **given)
        found = order if isinstance(order, TemplateRefusal) else self._rendered([order])[0]
        if isinstance(found, TemplateRefusal):
            raise found
        return found.text

    def render_all(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        prefixes: Sequence[Sequence[Prefix]],
    ) -> list[Rendering | TemplateRefusal]:
        """Render conversations, each with some of its prefixes.

        Args:
            conversations: role and content of each turn, for each conversation.
            prefixes: of each conversation.

        Raises:
            ValueError: the text is no template, or it takes too long, or too much memory.
        """
        orders = map(_order, conversations, prefixes)
        found: list[Rendering | TemplateRefusal] = []
        batch: list[bytes] = []
        size = 0
        for order in orders:
            refused = isinstance(order, TemplateRefusal)
            if batch and (refused or size >= _BATCH_BYTES):
                found += self._rendered(batch)
                batch, size = [], 0
            if isinstance(order, TemplateRefusal):
                found.append(order)
            else:
                batch.append(order)
                size += len(order)
        return found + self._rendered(batch)

    def _own(self) -> threading.Lock:
        """Return the lock of this process: one that was forked lets go of what its parent uses."""
        if self._owner != os.getpid():
            self._owner, self._lock, self._process = os.getpid(), threading.Lock(), None
        return self._lock

    def _rendered(self, orders: Sequence[bytes]) -> list[Rendering | TemplateRefusal]:
        with self._own():
            if not orders:
                return []
            process = self._started()
            try:
                process.send([LENGTH.pack(len(orders)), *map(_framed, orders)])
                return [self._judge(process.receive(self._limits.seconds)) for _ in orders]
            except BaseException:  # answers may be on their way
                process.close()
                raise

    def _started(self) -> _TemplateProcess:
        """Return the process, with the template compiled."""
        if self._process is not None and self._process.is_running:
            return self._process
        if self._process is not None:
            self._process.close()
        process = self._process = _TemplateProcess(self.name)
        order = {
            "source": self.source,
            "special_tokens": self.special_tokens,
            "cpu_seconds": self._limits.cpu_seconds,
            "memory_bytes": self._limits.memory_bytes,
        }
        try:
            process.receive(_START_SECONDS)
            process.send([_framed(_encoded_order(order))])
            answer = process.receive(self._limits.seconds)
            if answer.get("fault") == "error":
                raise ValueError(f"{self.name} is no Jinja template: {answer['text']}")
            self._judge({"text": "", "prefixes": [], **answer})
        except BaseException:
            process.close()
            raise
        return process

    def _judge(self, answer: Mapping[str, Any]) -> Rendering | TemplateRefusal:
        fault = answer.get("fault")
        if fault is None:
            return Rendering(answer["text"], tuple(answer["prefixes"]))
        if fault == "error":
            return TemplateRefusal(answer["text"])
        most = f"{self._limits.memory_bytes >> 20} MiB of memory"
        if fault == "time":
            most = f"{self._limits.cpu_seconds:g} s of CPU time"
        where = f" ({answer['text']})" if answer["text"] else ""
        raise ValueError(
            f"{self.name} takes more than {most} for one conversation{where}: give another with "
            "--chat-template"
        )


class _TemplateProcess:
    """A process of `template_process.py`, and the socket to it.

    Args:
        name: of the template, for messages.

    Raises:
        ValueError: jinja2 is missing, or there can be no process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        call = [sys.executable, "-I", "-S", template_process.__file__, *_library_folders()]
        self._end, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    call,
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={k: os.environ[k] for k in _ENVIRONMENT if k in os.environ},
                )
        except OSError as error:
            self._end.close()
            raise ValueError(f"cannot start a process for {name}: {error.strerror}") from None
        self.close = weakref.finalize(self, _end_process, os.getpid(), self._end, self._process)
        """End the process, whatever it is doing."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Say whether orders can be sent."""
        return self.close.alive and self._process.poll() is None

    def send(self, frames: Sequence[bytes]) -> None:
        """Send frames. Raises ValueError if the process is gone."""
        try:
            self._end.settimeout(_START_SECONDS)
            self._end.sendall(b"".join(frames))
        except OSError:
            raise self._lost(_START_SECONDS) from None

    def receive(self, seconds: float) -> Mapping[str, Any]:
        """Return the next answer. Raises ValueError if there is none in time."""
        deadline = time.monotonic() + seconds
        try:
            (length,) = LENGTH.unpack(self._exactly(LENGTH.size, deadline))
            if length > MAX_FRAME_BYTES:
                raise OSError
            found = json.loads(self._exactly(length, deadline).decode("utf-8", "surrogatepass"))
        except OSError:  # a timeout is one too
            raise self._lost(seconds) from None
        return found

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._end.settimeout(max(deadline - time.monotonic(), 0.001))
            found = self._end.recv(min(count - len(data), 1 << 20))
            if not found:
                raise ConnectionResetError
            data += found
        return bytes(data)

    def _lost(self, seconds: float) -> ValueError:
        """Say how the process ended, and see that it has."""
        try:
            code: int | None = self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None or code == -signal.SIGXCPU:
            why = "takes too much time" if code else f"gives no text within {seconds:g} s"
        elif code in (OUT_OF_MEMORY, -signal.SIGKILL):
            why = "takes too much memory"
        elif code < 0:
            why = f"ends its process by {signal.Signals(-code).name}: it is nested too deep"
        else:
            why = f"cannot be rendered: its process ended with code {code}"
        return ValueError(f"{self._name} {why}: give another with --chat-template")


def _end_process(owner: int, end: socket.socket, process: subprocess.Popen[bytes]) -> None:
    end.close()
    if owner == os.getpid():
        process.kill()
        process.wait()
    else:
        process.poll()  # not a child of this one: leaves nothing to wait for


def _library_folders() -> list[str]:
    """Return where jinja2 and what it needs are installed."""
    folders = []
    for library in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(library)
        if spec is None or spec.origin is None:
            raise ValueError("chat templates need jinja2: pip install jinja2")
        folders.append(str(Path(spec.origin).parent.parent.resolve()))
    return list(dict.fromkeys(folders))


def _order(
    messages: Sequence[Mapping[str, Any]],
    prefixes: Sequence[Prefix],
    *,
    prompt: bool = False,
    **more: Any,
) -> bytes | TemplateRefusal:
    """Return what is sent for a conversation."""
    pairs = [(p.turns, p.prompt) for p in prefixes]
    try:
        order = _encoded_order(
            {"messages": list(messages), "prompt": prompt, "prefixes": pairs, **more}
        )
    except RecursionError:
        return TemplateRefusal("the conversation is nested too deep")
    if len(order) > MAX_FRAME_BYTES:
        return TemplateRefusal(f"the conversation has more than {MAX_FRAME_BYTES} bytes")
    return order


def _encoded_order(order: Mapping[str, Any]) -> bytes:
    return json.dumps(order, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _framed(order: bytes) -> bytes:
    return LENGTH.pack(len(order)) + order


def read_chat_template(
    name_or_file: str | None, *, tokenizer_model: str | Path | None = None
) -> ChatTemplate:
    """Find a chat template.

    Args:
        name_or_file: a built-in name (chatml, llama3, plain) or a file of Jinja text; None takes
            that of the tokenizer's folder.
        tokenizer_model: a tokenizer's file or folder; `tokenizer_config.json` and
            `chat_template.jinja` beside it say which template and special tokens it has.

    Raises:
        ValueError: there is no such template, or it is none.
    """
    folder = None
    if tokenizer_model is not None:
        folder = Path(tokenizer_model)
        folder = folder if folder.is_dir() else folder.parent
    described = _described(folder)
    tokens = _special_tokens(described)
    if name_or_file is None:
        source = _of_folder(folder, described)
        if source is None:
            raise ValueError(
                f"{tokenizer_model or 'the tokenizer'} has no chat template: give --chat-template "
                f"a file or one of {', '.join(BUILT_IN)}"
            )
        return _checked(ChatTemplate(source, tokens, name=f"the chat template of {folder}"))
    if name_or_file in BUILT_IN:
        name = f"the chat template {name_or_file}"
        return ChatTemplate(BUILT_IN[name_or_file], tokens, name=name)
    path = Path(name_or_file)
    if not path.is_file():
        raise ValueError(
            f"--chat-template {name_or_file}: no such file; give a file or one of "
            f"{', '.join(BUILT_IN)}"
        )
    return _checked(ChatTemplate(_read(path, named=True), tokens, name=f"the chat template {path}"))


def has_chat_template(tokenizer_model: str | Path | None) -> bool:
    """Say whether a tokenizer's file or folder comes with a chat template."""
    if tokenizer_model is None:
        return False
    folder = Path(tokenizer_model)
    folder = folder if folder.is_dir() else folder.parent
    return _of_folder(folder, _described(folder)) is not None


def _checked(template: ChatTemplate) -> ChatTemplate:
    template.check()
    return template


def _read(path: Path, *, named: bool = False) -> str:
    try:
        return read_text(path, _LARGEST_TEMPLATE_BYTES, follow_links=named)
    except OSError as error:
        raise ValueError(f"{path} is no chat template: {error.strerror}") from None


def _described(folder: Path | None) -> Mapping[str, Any]:
    """Return the contents of `tokenizer_config.json`; nothing if there is none."""
    path = folder / "tokenizer_config.json" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        found = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} is damaged: {error.strerror}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it is no JSON object")
    return found


def _special_tokens(described: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKENS:
        value = described.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _of_folder(folder: Path | None, described: Mapping[str, Any]) -> str | None:
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    source = described.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"
_FIRST_ROLES = ("system", "developer", "user")
_MARKS = (END_MARK, *GENERATION_MARKS)


class MalformedConversation(ValueError):
    """A conversation that cannot be learnt from; `reason` is a short text to count by."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@runtime_checkable
class OffsetTokenizer(Protocol):
    """A tokenizer that knows which characters each of its tokens covers."""

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and their (first, last + 1) characters."""


def encode_conversations(
    conversations: Sequence[object], tokenizer: Tokenizer, template: ChatTemplate
) -> list[tuple[list[int], list[int]] | MalformedConversation]:
    """Turn conversations into token ids and loss masks, or into what is wrong with each.

    Args:
        conversations: each a list of objects with `role` and `content`, both texts.
        tokenizer: of the model.
        template: how the turns are written.

    Returns:
        (ids, mask) of each, or why it cannot be learnt from; mask is 1 on the assistant's text,
        the token that ends it included.

    Raises:
        ValueError: the template is not prefix-stable; no conversation of that kind can be masked.
    """
    found: list[Any] = []
    for messages in conversations:
        try:
            found.append(check_conversation(messages))
        except MalformedConversation as error:
            found.append(error)
    whole = [i for i, turns in enumerate(found) if not isinstance(turns, MalformedConversation)]
    prefixes = [_answers(found[i], template) for i in whole]
    renderings = template.render_all([found[i] for i in whole], prefixes)
    for i, rendering in zip(whole, renderings, strict=True):
        if isinstance(rendering, TemplateRefusal):
            found[i] = MalformedConversation("the template refuses it", str(rendering))
            continue
        text, spans = spoken(found[i], rendering, template)
        ids, mask = _encoded(text, spans, tokenizer, template)
        found[i] = (ids, mask)
        if not any(mask):
            found[i] = MalformedConversation(
                "nothing to learn", "the assistant's turns have no tokens"
            )
    return found


def _encoded(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    mask: list[int] = []
    start = 0
    pieces = text.split(END_MARK)
    for i, piece in enumerate(pieces):
        stop = start + len(piece)
        inside = [(max(a, start) - start, min(b, stop) - start) for a, b in spans]
        found, learnt = _tokens(piece, [(a, b) for a, b in inside if a < b], tokenizer)
        ids += found
        mask += learnt
        if i + 1 < len(pieces):
            if tokenizer.eod is None:
                raise ValueError(
                    f"{template.name} ends turns with the end-of-document token, which the "
                    "tokenizer lacks: choose another --chat-template"
                )
            ids.append(tokenizer.eod)
            mask.append(int(any(a <= stop < b for a, b in spans)))
        start = stop + 1
    return ids, mask


def check_conversation(messages: object) -> list[Mapping[str, Any]]:
    """Return the turns of a conversation.

    Raises:
        MalformedConversation: it is not a list of turns with known roles and texts, the assistant
            never speaks, or speaks first.
    """
    if not isinstance(messages, list) or not messages:
        raise MalformedConversation("no list of messages")
    for i, turn in enumerate(messages):
        if not isinstance(turn, dict) or "role" not in turn:
            raise MalformedConversation("a message without a role", f"message {i}")
        if turn["role"] not in ROLES:
            raise MalformedConversation("unknown role", f"message {i} has {turn['role']!r:.40}")
        if not isinstance(turn.get("content"), str):
            raise MalformedConversation("content is no text", f"message {i}")
        if any(mark in turn["content"] for mark in _MARKS):
            raise MalformedConversation("a reserved character", f"message {i}, U+E0F0 to U+E0F2")
        if i and turn["role"] == "system":
            raise MalformedConversation("a system message is not the first", f"message {i}")
    if messages[0]["role"] not in _FIRST_ROLES:
        raise MalformedConversation(f"the {messages[0]['role']} speaks first")
    if all(turn["role"] != ASSISTANT for turn in messages):
        raise MalformedConversation("no assistant message")
    return messages


def _answers(turns: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[Prefix]:
    """Return what must be rendered to find the assistant's turns: before and after each."""
    if template.marks_generation:
        return []
    said = [i for i, turn in enumerate(turns) if turn["role"] == ASSISTANT]
    return [p for i in said for p in (Prefix(i, prompt=True), Prefix(i + 1, prompt=False))]


def spoken(
    messages: Sequence[Mapping[str, Any]], rendering: Rendering, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """Find the assistant's text in a rendered conversation.

    Args:
        messages: of the conversation.
        rendering: of it, with the prefixes before and after each of the assistant's turns.
        template: that rendered it.

    Returns:
        (text, spans): spans are (first, last + 1) characters, in order.

    Raises:
        ValueError: the template renders the same turns differently in a longer conversation.
    """
    text = rendering.text
    if template.marks_generation:
        return _marked(text)
    said = [i for i, turn in enumerate(messages) if turn["role"] == ASSISTANT]
    spans = []
    for i, before, after in zip(said, rendering.lengths[::2], rendering.lengths[1::2], strict=True):
        if before is None or after is None or after < before:
            raise ValueError(
                f"{template.name} writes the turns up to message {i} differently when more "
                "follows, so the assistant's part cannot be found: mark it with "
                "{% generation %}, or give --chat-template another one, such as chatml"
            )
        spans.append((before, _end(text[:after], before, messages[i]["content"])))
    return text, [(a, b) for a, b in spans if a < b]


def _end(after: str, start: int, content: str) -> int:
    """Leave out white space after the mark that ends a turn: a model stops at the mark."""
    said = after[start:].rstrip()
    if said.endswith(content.rstrip()):  # there is no mark: the white space ends the turn
        return len(after)
    return start + len(said)


def _marked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Take the marks of `{% generation %}` out of a text; return it and where they stood."""
    opening, closing = GENERATION_MARKS
    first, *parts = text.split(opening)
    plain, spans = first, []
    for part in parts:
        said, _, rest = part.partition(closing)
        spans.append((len(plain), len(plain) + len(said)))
        plain += said + rest
    return plain, spans


def _tokens(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """Return ids of a text and 1 for each that covers a character of a span."""
    if not text:
        return [], []
    if isinstance(tokenizer, OffsetTokenizer):
        ids, offsets = tokenizer.tokenize_with_offsets(text)
        return ids, [int(any(a < last and first < b for a, b in spans)) for first, last in offsets]
    encode = partial(tokenizer.tokenize, add_special_tokens=False)
    ids = encode(text)
    mask = [0] * len(ids)
    for first, last in spans:
        begin = _common(ids, encode(text[:first]))
        end = _common(ids, encode(text[:last]))
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count how many ids two lists have in common from the start."""
    same = (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    return next(same, min(len(ids), len(others)))
