# SPDX-License-Identifier: Apache-2.0
"""Read and write option values as YAML. Errors name file and line.

A file is one flat mapping from option name to value. Values are parsed by the type of their option,
so `1e-4` is a number although PyYAML reads it as a string. Unknown keys, duplicate keys, nested
mappings, anchors and tags are errors. Only the parser's node tree is used, so that a file cannot
construct objects, and time and memory are bounded.

`${NAME}` in a value is replaced by the environment variable before the value is parsed; `$${`
stands for `${`. Variables with secrets are refused, because options are logged and saved.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.cli.megatron_names import ALIASES, answer
from megatron.cli.schema import Option, suggest
from megatron.core.untrusted_files import read_named

# A file with every option and its comments takes about 10 kB.
_MAX_BYTES = 256 * 1024
_VARIABLE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")
_SECRET = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$)", re.IGNORECASE
)


def read_options(
    path: str | Path,
    known_options: Sequence[Option],
    *,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Read option values from a YAML file.

    Args:
        path: the file.
        known_options: options that keys may name; `_` and `-` are equivalent in a key.
        environment: environment variables for `${NAME}`.

    Returns:
        Values by option name.

    Raises:
        ValueError: the file cannot be read; otherwise its first error with `file:line`.
    """
    by_name = {option.name: option for option in known_options}
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in _pairs(path):
        location = f"{path}:{key_node.start_mark.line + 1}"
        spelled = str(key_node.value).replace("_", "-")
        key, text = (spelled, "") if spelled in by_name else ALIASES.get(spelled, (spelled, ""))
        if key not in by_name:
            raise ValueError(_unknown(location, key_node.value, key, by_name))
        if key in values:
            raise ValueError(f"{location}: {key} is already set on line {lines[key]}: keep one")
        where = f"{path}:{value_node.start_mark.line + 1}: {spelled}"
        if text:
            if str(value_node.value).lower() != "true":
                raise ValueError(f"{where} must be true: it stands for {key}: {text}")
            values[key] = by_name[key].parse([text], where)
        else:
            values[key] = _value(by_name[key], value_node, where, environment)
        lines[key] = key_node.start_mark.line + 1
    return values


def _pairs(path: str | Path) -> list[tuple[Any, Any]]:
    """Return the (key, value) nodes of a file. Raises ValueError."""
    try:
        import yaml
    except ImportError:
        raise ValueError("--config needs PyYAML: pip install pyyaml, or give flags") from None
    try:
        text = read_named(path, _MAX_BYTES)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    try:
        _check_events(path, yaml.parse(text, Loader=yaml.SafeLoader))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{line}: not valid YAML: {_first_line(error)}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}:1: expected `option: value` lines")
    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{path}:{key.start_mark.line + 1}: a key must be an option's name")
    return list(root.value)


def _check_events(path: str | Path, events: Any) -> None:
    """Refuse anchors and deep nesting before a tree is built, which they could make huge."""
    import yaml

    depth = 0
    for event in events:
        location = f"{path}:{event.start_mark.line + 1}"
        if getattr(event, "anchor", None) is not None:
            raise ValueError(
                f"{location}: anchors and aliases are not allowed: write the value out"
            )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > 3:  # shallow nesting is reported later, with its option
            raise ValueError(
                f"{location}: lists and mappings are nested too deeply: one flat mapping"
            )


def _unknown(location: str, spelled: str, key: str, by_name: Mapping[str, Option]) -> str:
    """Return the error for an unknown key, with advice if Megatron has the option."""
    megatron_answer = answer(key)
    if megatron_answer is not None and (
        megatron_answer.nearest is None or megatron_answer.nearest in by_name
    ):
        return f"{location}: {megatron_answer.text(key)}"
    return f"{location}: unknown key {spelled!r}{suggest(key, by_name)}"


def _expand(text: str, where: str, environment: Mapping[str, str]) -> str:
    """Replace `${NAME}` by environment variables. Raises ValueError."""

    def replacement(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return "${"
        if _SECRET.search(name):
            raise ValueError(
                f"{where}: ${{{name}}} looks like a secret, and options are shown and saved: leave "
                "it in the environment"
            )
        if name not in environment:
            raise ValueError(
                f"{where}: the environment variable {name} is not set: set it, or write $${{ for a "
                "plain ${"
            )
        return environment[name]

    return _VARIABLE.sub(replacement, text)


def _first_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _value(option: Option, node: Any, where: str, environment: Mapping[str, str]) -> Any:
    """Parse a value node; `where` names file, line and key in errors."""
    import yaml

    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if isinstance(node, yaml.SequenceNode) and not option.many:
        raise ValueError(f"{where} takes one value, not a list")
    texts = []
    literal = option.kind is str and not option.choices
    for item in [node, *nodes]:
        if not item.tag.startswith("tag:yaml.org,2002:") or "python" in item.tag:
            raise ValueError(f"{where}: the tag {item.tag} is not allowed: write a plain value")
    for item in nodes:
        if not isinstance(item, yaml.ScalarNode):
            raise ValueError(f"{where} must be a plain value, not a nested one")
        text = _expand(item.value, where, environment)
        plain_null = item.style is None and item.value.lower() in ("", "~", "null")
        if plain_null and not option.optional:
            raise ValueError(f"{where} has no value: give one or remove the line")
        if item.style is not None and literal and not option.many:
            return option.literal(text, where)  # quoted: the string itself, even "none"
        texts.append("none" if plain_null else text)
    if isinstance(node, yaml.SequenceNode) and literal and texts:
        return tuple(option.literal(text, where) for text in texts)
    return option.parse(texts, where)


def write_options(
    values: Mapping[str, Any],
    known_options: Sequence[Option],
    *,
    notes: Mapping[str, str] | None = None,
) -> str:
    """Return option values as YAML that `read_options` reads.

    Args:
        values: values by option name.
        known_options: the options, in the order to write.
        notes: comment lines at the top of the file, `name: text`.
    """
    lines = [f"# {name}: {note}" for name, note in (notes or {}).items()]
    section: str | None = None
    for option in known_options:
        if option.section is not None and option.section != section:
            section = option.section
            lines.append(f"# {section.replace('_', ' ')}")
        lines.append(f"{option.name}: {_text(values[option.name])}")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    # null, true, numbers and double-quoted strings of JSON mean the same in YAML, except for
    # characters that YAML requires to be escaped, and for `${`, which would name a variable.
    text = json.dumps(value, ensure_ascii=False).replace("${", "$${")
    return re.sub(r"[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]", _escape, text)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match.group()):04x}"
