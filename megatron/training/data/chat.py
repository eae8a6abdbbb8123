# SPDX-License-Identifier: Apache-2.0
"""Encode a conversation as token ids and a loss mask over the assistant's turns.

The whole rendered text is tokenized at once, as `transformers` does. The template writes special
tokens such as BOS; the tokenizer adds none. The template either marks the assistant's text
(`{% generation %}`), or the conversation is rendered twice per turn: up to the turn with the
generation prompt, and including the turn. The text between the two ends is in the loss. It is
exactly the text that the model generates at inference, end-of-turn token included.

Chat templates come from a tokenizer's folder, a file or a built-in name. A template is Jinja text
as in Hugging Face tokenizers, and the Jinja settings are the same, so the text equals the text of
`transformers`. Templates cannot read the clock: a training text must not depend on the date. They
are rendered in a separate sandboxed process with limits on memory and time: see
`template_process.py`.
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

from megatron.cli.gguf_file import SUFFIX
from megatron.cli.tokenizers import Tokenizer
from megatron.cli.tokenizers.gguf_metadata import gguf_chat_fields
from megatron.core.untrusted_files import read_json, read_text
from megatron.training.data import template_process
from megatron.training.data.template_process import (
    GENERATION_MARKS,
    LENGTH,
    MAX_FRAME_BYTES,
    OUT_OF_MEMORY,
)

__all__ = ["ChatTemplate", "MalformedConversation", "encode_conversations", "read_chat_template"]


#: Placeholder in the rendered text for an end-of-document token that has no text.
END_MARK = "\ue0f0"

_MAX_TEMPLATE_BYTES = 1 << 20
# Conversations are sent to the template process in batches of about this size.
_BATCH_BYTES = 1 << 18
_START_TIMEOUT_SECONDS = 60.0
# Only what Python needs to start: a template must not read other environment variables.
_ENVIRONMENT_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME")
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
    """The template cannot render a conversation; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits for compiling a template and for rendering one conversation."""

    cpu_seconds: float = 4.0
    """CPU time, in seconds."""
    seconds: float = 10.0
    """Wall-clock time, in seconds."""
    memory_bytes: int = 768 << 20
    """Address space in bytes, on top of the process with jinja2 loaded."""


@dataclass(frozen=True)
class Prefix:
    """The first turns of a conversation, rendered separately.

    Args:
        turns: number of turns.
        prompt: whether to append the generation prompt.
    """

    turns: int
    prompt: bool


@dataclass(frozen=True)
class Rendering:
    """The text of a conversation.

    Args:
        text: with `GENERATION_MARKS` if the template sets them.
        lengths: length of each requested prefix, in characters; None if the text does not start
            with the prefix.
    """

    text: str
    lengths: tuple[int | None, ...]


class ChatTemplate:
    """A chat template and the process that renders it, started on first use.

    The process loads only jinja2 and has resource limits: a template that loops or exhausts memory
    raises an error here. A forked process starts its own template process.

    Args:
        source: Jinja text.
        special_tokens: texts by name, such as `eos_token`; `END_MARK` for a missing end token.
        name: name in error messages.
        limits: CPU time, wall-clock time and memory.
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
        """Return a digest of the source and the special tokens."""
        text = json.dumps([self.source, self.special_tokens], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def pid(self) -> int | None:
        """Process id of the template process; None if it is not running."""
        with self._process_lock():
            process = self._process
            return process.pid if process is not None and process.is_running else None

    def check(self) -> None:
        """Compile the template.

        Raises:
            ValueError: jinja2 is not installed, or the text is not a Jinja template.
        """
        with self._process_lock():
            self._ensure_started()

    def close(self) -> None:
        """Stop the template process; the next rendering starts a new one."""
        with self._process_lock():
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
            add_generation_prompt: append the generation prompt.
            tools: tools that the model may call, in OpenAI's schema.
            variables: further template variables, by name.

        Raises:
            TemplateRefusal: the template cannot render these messages.
            ValueError: the text is no template, or it takes too long, or too much memory.
        """
        optional_inputs = {"tools": tools, "variables": variables}
        template_inputs = {name: value for name, value in optional_inputs.items() if value}
        request = _encode_request(messages, (), prompt=add_generation_prompt, **template_inputs)
        rendering = (
            request if isinstance(request, TemplateRefusal) else self._render_batch([request])[0]
        )
        if isinstance(rendering, TemplateRefusal):
            raise rendering
        return rendering.text

    def render_all(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        prefixes: Sequence[Sequence[Prefix]],
    ) -> list[Rendering | TemplateRefusal]:
        """Render conversations, each with some of its prefixes.

        Args:
            conversations: role and content of each turn, for each conversation.
            prefixes: prefixes to measure, for each conversation.

        Raises:
            ValueError: the text is no template, or it takes too long, or too much memory.
        """
        requests = map(_encode_request, conversations, prefixes)
        renderings: list[Rendering | TemplateRefusal] = []
        batch: list[bytes] = []
        size = 0
        for request in requests:
            is_refusal = isinstance(request, TemplateRefusal)
            if batch and (is_refusal or size >= _BATCH_BYTES):
                renderings += self._render_batch(batch)
                batch, size = [], 0
            if isinstance(request, TemplateRefusal):
                renderings.append(request)
            else:
                batch.append(request)
                size += len(request)
        return renderings + self._render_batch(batch)

    def _process_lock(self) -> threading.Lock:
        """Return the lock of this process; after a fork, forget the parent's template process."""
        if self._owner != os.getpid():
            self._owner, self._lock, self._process = os.getpid(), threading.Lock(), None
        return self._lock

    def _render_batch(self, requests: Sequence[bytes]) -> list[Rendering | TemplateRefusal]:
        with self._process_lock():
            if not requests:
                return []
            process = self._ensure_started()
            try:
                process.send([LENGTH.pack(len(requests)), *map(_frame, requests)])
                return [self._parse_answer(process.receive(self._limits.seconds)) for _ in requests]
            except BaseException:  # unread answers may be left in the socket
                process.close()
                raise

    def _ensure_started(self) -> _TemplateProcess:
        """Return the running process with the compiled template, starting it if necessary."""
        if self._process is not None and self._process.is_running:
            return self._process
        if self._process is not None:
            self._process.close()
        process = self._process = _TemplateProcess(self.name)
        request = {
            "source": self.source,
            "special_tokens": self.special_tokens,
            "cpu_seconds": self._limits.cpu_seconds,
            "memory_bytes": self._limits.memory_bytes,
        }
        try:
            process.receive(_START_TIMEOUT_SECONDS)
            process.send([_frame(_encode_json(request))])
            answer = process.receive(self._limits.seconds)
            if answer.get("fault") == "error":
                raise ValueError(f"{self.name} is not a Jinja template: {answer['text']}")
            self._parse_answer({"text": "", "prefixes": [], **answer})
        except BaseException:
            process.close()
            raise
        return process

    def _parse_answer(self, answer: Mapping[str, Any]) -> Rendering | TemplateRefusal:
        fault = answer.get("fault")
        if fault is None:
            return Rendering(answer["text"], tuple(answer["prefixes"]))
        if fault == "error":
            return TemplateRefusal(answer["text"])
        limit = f"{self._limits.memory_bytes >> 20} MiB of memory"
        if fault == "time":
            limit = f"{self._limits.cpu_seconds:g} s of CPU time"
        where = f" ({answer['text']})" if answer["text"] else ""
        raise ValueError(
            f"{self.name} takes more than {limit} for one conversation{where}: give another one "
            "with "
            "--chat-template"
        )


class _TemplateProcess:
    """A process that runs `template_process.py`, and the socket to it.

    Args:
        name: name of the template in error messages.

    Raises:
        ValueError: jinja2 is not installed, or the process cannot be started.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        command = [sys.executable, "-I", "-S", template_process.__file__, *_library_folders()]
        self._socket, child_socket = socket.socketpair()
        try:
            with child_socket:
                self._process = subprocess.Popen(
                    command,
                    stdin=child_socket,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={k: os.environ[k] for k in _ENVIRONMENT_VARIABLES if k in os.environ},
                )
        except OSError as error:
            self._socket.close()
            raise ValueError(f"cannot start a process for {name}: {error.strerror}") from None
        self.close = weakref.finalize(self, _end_process, os.getpid(), self._socket, self._process)
        """Kill the process."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process can receive requests."""
        return self.close.alive and self._process.poll() is None

    def send(self, frames: Sequence[bytes]) -> None:
        """Send frames. Raises ValueError if the process has ended."""
        try:
            self._socket.settimeout(_START_TIMEOUT_SECONDS)
            self._socket.sendall(b"".join(frames))
        except OSError:
            raise self._process_error(_START_TIMEOUT_SECONDS) from None

    def receive(self, seconds: float) -> Mapping[str, Any]:
        """Return the next answer. Raises ValueError if none arrives in time."""
        deadline = time.monotonic() + seconds
        try:
            (length,) = LENGTH.unpack(self._read_exactly(LENGTH.size, deadline))
            if length > MAX_FRAME_BYTES:
                raise OSError
            answer = json.loads(
                self._read_exactly(length, deadline).decode("utf-8", "surrogatepass")
            )
        except OSError:  # TimeoutError is an OSError
            raise self._process_error(seconds) from None
        return answer

    def _read_exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            chunk = self._socket.recv(min(count - len(data), 1 << 20))
            if not chunk:
                raise ConnectionResetError
            data += chunk
        return bytes(data)

    def _process_error(self, seconds: float) -> ValueError:
        """Kill the process and return an error that says how it ended."""
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
        return ValueError(f"{self._name} {why}: give another one with --chat-template")


def _end_process(
    owner: int, parent_socket: socket.socket, process: subprocess.Popen[bytes]
) -> None:
    parent_socket.close()
    if owner == os.getpid():
        process.kill()
        process.wait()
    else:
        process.poll()  # a fork's parent owns the process: only the parent can wait for it


def _library_folders() -> list[str]:
    """Return the folders that contain jinja2 and its dependency markupsafe."""
    folders = []
    for library in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(library)
        if spec is None or spec.origin is None:
            raise ValueError("chat templates need jinja2: pip install jinja2")
        folders.append(str(Path(spec.origin).parent.parent.resolve()))
    return list(dict.fromkeys(folders))


def _encode_request(
    messages: Sequence[Mapping[str, Any]],
    prefixes: Sequence[Prefix],
    *,
    prompt: bool = False,
    **template_inputs: Any,
) -> bytes | TemplateRefusal:
    """Return the JSON request for one conversation, or a refusal if it is too large."""
    pairs = [(p.turns, p.prompt) for p in prefixes]
    try:
        request = _encode_json(
            {"messages": list(messages), "prompt": prompt, "prefixes": pairs, **template_inputs}
        )
    except RecursionError:
        return TemplateRefusal("the conversation is nested too deep")
    if len(request) > MAX_FRAME_BYTES:
        return TemplateRefusal(f"the conversation has more than {MAX_FRAME_BYTES} bytes")
    return request


def _encode_json(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _frame(request: bytes) -> bytes:
    return LENGTH.pack(len(request)) + request


def read_chat_template(
    name_or_file: str | None, *, tokenizer_model: str | Path | None = None
) -> ChatTemplate:
    """Find a chat template.

    Args:
        name_or_file: a built-in name (chatml, llama3, plain) or a file of Jinja text; None takes
            the template in the tokenizer's folder.
        tokenizer_model: a tokenizer's file or folder; `tokenizer_config.json` and
            `chat_template.jinja` in the folder define its template and special tokens.

    Raises:
        ValueError: there is no such template, or the file is not a template.
    """
    folder, tokenizer_config = _tokenizer_folder(tokenizer_model)
    tokens = _special_tokens(tokenizer_config)
    if name_or_file is None:
        source = _folder_template(folder, tokenizer_config)
        if source is None:
            raise ValueError(
                f"{tokenizer_model or 'the tokenizer'} has no chat template: give --chat-template "
                f"a file or one of {', '.join(BUILT_IN)}"
            )
        return _checked(
            ChatTemplate(source, tokens, name=f"the chat template of {folder or tokenizer_model}")
        )
    if name_or_file in BUILT_IN:
        name = f"the chat template {name_or_file}"
        return ChatTemplate(BUILT_IN[name_or_file], tokens, name=name)
    path = Path(name_or_file)
    if not path.is_file():
        raise ValueError(
            f"--chat-template {name_or_file}: no such file; give a file or one of "
            f"{', '.join(BUILT_IN)}"
        )
    return _checked(
        ChatTemplate(_read(path, follow_links=True), tokens, name=f"the chat template {path}")
    )


def has_chat_template(tokenizer_model: str | Path | None) -> bool:
    """Return whether a tokenizer's folder contains a chat template."""
    return _folder_template(*_tokenizer_folder(tokenizer_model)) is not None


def _tokenizer_folder(
    tokenizer_model: str | Path | None,
) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the folder of a tokenizer and its `tokenizer_config.json`. A GGUF file has no folder;
    its metadata contain these fields."""
    if tokenizer_model is None:
        return None, {}
    path = Path(tokenizer_model)
    if path.suffix == SUFFIX:
        return None, gguf_chat_fields(path)
    folder = path if path.is_dir() else path.parent
    return folder, _read_tokenizer_config(folder)


def _checked(template: ChatTemplate) -> ChatTemplate:
    template.check()
    return template


def _read(path: Path, *, follow_links: bool = False) -> str:
    try:
        return read_text(path, _MAX_TEMPLATE_BYTES, follow_links=follow_links)
    except OSError as error:
        raise ValueError(f"{path} is not a chat template: {error.strerror}") from None


def _read_tokenizer_config(folder: Path | None) -> Mapping[str, Any]:
    """Return the contents of `tokenizer_config.json`; empty if there is no such file."""
    path = folder / "tokenizer_config.json" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        tokenizer_config = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} is damaged: {error.strerror}") from None
    if not isinstance(tokenizer_config, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    return tokenizer_config


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _folder_template(folder: Path | None, tokenizer_config: Mapping[str, Any]) -> str | None:
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        templates = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = templates.get("default")
    return source if isinstance(source, str) else None


ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"
_FIRST_ROLES = ("system", "developer", "user")
_MARKS = (END_MARK, *GENERATION_MARKS)


class MalformedConversation(ValueError):
    """A conversation that cannot be trained on; `reason` is a short text used as a counter key."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@runtime_checkable
class OffsetTokenizer(Protocol):
    """A tokenizer that returns the character span of each token."""

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return token ids and the (start, stop) characters of each."""
        ...


def encode_conversations(
    conversations: Sequence[object], tokenizer: Tokenizer, template: ChatTemplate
) -> list[tuple[list[int], list[int]] | MalformedConversation]:
    """Encode conversations as token ids and loss masks.

    Args:
        conversations: each a list of objects with `role` and `content`, both strings.
        tokenizer: tokenizer of the model.
        template: chat template.

    Returns:
        For each conversation (ids, mask), or the error. The mask is 1 on the assistant's text,
        including the token that ends the turn.

    Raises:
        ValueError: the template is not prefix-stable, so the assistant's text cannot be located.
    """
    encoded: list[Any] = []
    for messages in conversations:
        try:
            encoded.append(check_conversation(messages))
        except MalformedConversation as error:
            encoded.append(error)
    valid = [i for i, turns in enumerate(encoded) if not isinstance(turns, MalformedConversation)]
    prefixes = [_answer_prefixes(encoded[i], template) for i in valid]
    renderings = template.render_all([encoded[i] for i in valid], prefixes)
    for i, rendering in zip(valid, renderings, strict=True):
        if isinstance(rendering, TemplateRefusal):
            encoded[i] = MalformedConversation("the template refuses it", str(rendering))
            continue
        text, spans = assistant_spans(encoded[i], rendering, template)
        ids, mask = _encode(text, spans, tokenizer, template)
        encoded[i] = (ids, mask)
        if not any(mask):
            encoded[i] = MalformedConversation(
                "nothing to learn", "the assistant's turns have no tokens"
            )
    return encoded


def _encode(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    mask: list[int] = []
    start = 0
    segments = text.split(END_MARK)
    for i, segment in enumerate(segments):
        stop = start + len(segment)
        segment_spans = [(max(a, start) - start, min(b, stop) - start) for a, b in spans]
        segment_ids, segment_mask = _tokenize_spans(
            segment, [(a, b) for a, b in segment_spans if a < b], tokenizer
        )
        ids += segment_ids
        mask += segment_mask
        if i + 1 < len(segments):
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
        MalformedConversation: it is not a list of turns with a supported role and a text, has no
            assistant turn, or starts with one.
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


def _answer_prefixes(turns: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[Prefix]:
    """Return the prefixes that end right before and right after each assistant turn."""
    if template.marks_generation:
        return []
    answers = [i for i, turn in enumerate(turns) if turn["role"] == ASSISTANT]
    return [p for i in answers for p in (Prefix(i, prompt=True), Prefix(i + 1, prompt=False))]


def assistant_spans(
    messages: Sequence[Mapping[str, Any]], rendering: Rendering, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """Locate the assistant's text in a rendered conversation.

    Args:
        messages: the turns.
        rendering: the rendered text, with the prefixes before and after each assistant turn.
        template: the chat template.

    Returns:
        (text, spans): spans are (start, stop) characters, in order.

    Raises:
        ValueError: the template renders the same turns differently in a longer conversation.
    """
    text = rendering.text
    if template.marks_generation:
        return _remove_marks(text)
    answers = [i for i, turn in enumerate(messages) if turn["role"] == ASSISTANT]
    spans = []
    for i, before, after in zip(
        answers, rendering.lengths[::2], rendering.lengths[1::2], strict=True
    ):
        if before is None or after is None or after < before:
            raise ValueError(
                f"{template.name} renders the turns up to message {i} differently when more turns "
                "follow, so the assistant's text cannot be located: mark it with "
                "{% generation %}, or give --chat-template another one, such as chatml"
            )
        spans.append((before, _end(text[:after], before, messages[i]["content"])))
    return text, [(a, b) for a, b in spans if a < b]


def _end(text: str, start: int, content: str) -> int:
    """Return where an answer ends: without white space after the end-of-turn marker.

    Generation stops at the marker, so the model never produces the white space.
    """
    answer = text[start:].rstrip()
    if answer.endswith(content.rstrip()):  # no end-of-turn marker: the white space ends the turn
        return len(text)
    return start + len(answer)


def _remove_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the `{% generation %}` marks; return the text and the marked spans."""
    opening, closing = GENERATION_MARKS
    unmarked, *marked_segments = text.split(opening)
    plain, spans = unmarked, []
    for marked_segment in marked_segments:
        answer, _, following = marked_segment.partition(closing)
        spans.append((len(plain), len(plain) + len(answer)))
        plain += answer + following
    return plain, spans


def _tokenize_spans(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """Return token ids and a mask: 1 for each token that overlaps a span."""
    if not text:
        return [], []
    if isinstance(tokenizer, OffsetTokenizer):
        ids, offsets = tokenizer.tokenize_with_offsets(text)
        return ids, [int(any(a < stop and start < b for a, b in spans)) for start, stop in offsets]
    encode = partial(tokenizer.tokenize, add_special_tokens=False)
    ids = encode(text)
    mask = [0] * len(ids)
    for start, stop in spans:
        begin = _common_prefix_length(ids, encode(text[:start]))
        end = _common_prefix_length(ids, encode(text[:stop]))
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def _common_prefix_length(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists."""
    mismatches = (i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b)
    return next(mismatches, min(len(ids), len(other_ids)))
