# SPDX-License-Identifier: Apache-2.0
"""Chat templates: from a tokenizer's folder, a file or a built-in name, rendered in a sandbox.

A template is Jinja text as Hugging Face tokenizers carry it, with the same settings, so that its
rendering is that of `transformers`. It gets no clock: a text must not depend on the day. This is
the one module that imports the library `jinja2`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: Stands in a rendering for the end-of-document token of a tokenizer that has no text for it.
END_MARK = "\ue0f0"
#: Around what `{% generation %}` marks; taken out again before anybody sees the text.
GENERATION_MARKS = ("\ue0f1", "\ue0f2")

_LARGEST_TEMPLATE_BYTES = 1 << 20
_LARGEST_PRODUCT = 1 << 20
_SECONDS_PER_CONVERSATION = 10.0
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
    """The template itself refuses a conversation, with `raise_exception` or an undefined name."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        special_tokens: texts by name, such as `eos_token`; `END_MARK` where there is none.
        name: for messages.

    Raises:
        ValueError: jinja2 is missing, or the text is no template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        name: str = "chat template",
    ) -> None:
        self.name, self.source = name, source
        self.special_tokens = {"bos_token": "", "eos_token": END_MARK, **(special_tokens or {})}
        self._compiled = _compile(source, name)

    @property
    def marks_generation(self) -> bool:
        """Say whether the template marks what the assistant says with `{% generation %}`."""
        return "generation %}" in self.source and "endgeneration" in self.source

    @property
    def fingerprint(self) -> str:
        """Return a digest that is equal for templates that render alike."""
        text = json.dumps([self.source, self.special_tokens], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation, with `GENERATION_MARKS` if the template sets them.

        Args:
            messages: role and content of each turn.
            add_generation_prompt: end with what opens an answer.

        Raises:
            TemplateRefusal: the template cannot render these messages.
            ValueError: it takes too long, or more memory than there is.
        """
        from jinja2 import TemplateError

        try:
            with _cpu_limit(_SECONDS_PER_CONVERSATION):
                return self._compiled.render(
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                    **self.special_tokens,
                )
        except (TimeoutError, MemoryError) as error:
            what = "time" if isinstance(error, TimeoutError) else "memory"
            raise ValueError(
                f"{self.name} takes too much {what} for one conversation: give another with "
                "--chat-template"
            ) from None
        except (TemplateError, TypeError, KeyError, OverflowError) as error:
            raise TemplateRefusal(" ".join(str(error).split()) or type(error).__name__) from None


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so much CPU time; only a main thread can be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


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
        return ChatTemplate(source, tokens, name=f"the chat template of {folder}")
    if name_or_file in BUILT_IN:
        name = f"the chat template {name_or_file}"
        return ChatTemplate(BUILT_IN[name_or_file], tokens, name=name)
    path = Path(name_or_file)
    if not path.is_file():
        raise ValueError(
            f"--chat-template {name_or_file}: no such file; give a file or one of "
            f"{', '.join(BUILT_IN)}"
        )
    return ChatTemplate(_read(path), tokens, name=f"the chat template {path}")


def _read(path: Path) -> str:
    if path.stat().st_size > _LARGEST_TEMPLATE_BYTES:
        raise ValueError(f"{path} has more than {_LARGEST_TEMPLATE_BYTES} bytes: no chat template")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def _described(folder: Path | None) -> Mapping[str, Any]:
    """Return what `tokenizer_config.json` says; nothing if there is none."""
    path = folder / "tokenizer_config.json" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
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


def _compile(source: str, name: str) -> Any:
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat templates need jinja2: pip install jinja2") from None

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
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"{name} is no Jinja template: {error}") from None
