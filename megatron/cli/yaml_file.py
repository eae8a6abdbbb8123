# SPDX-License-Identifier: Apache-2.0
"""YAML files of options: strict reading with file and line, and writing that reads back the same.

A file is one flat mapping from option name to value. The text of a value is parsed by the
option's own type, so `1e-4` is a number although PyYAML alone reads it as a string. Unknown keys,
duplicate keys, nested mappings, anchors and tags are errors. Only the parser's node tree is used:
nothing in a file can construct an object, and what it costs to read is bounded.

`${NAME}` in a value is replaced by that environment variable, before the value is parsed; `$${` is
`${` itself. Options are shown and saved, so a variable that holds a secret is refused.
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

# A file of every option with its comments has some 10 kB.
_MOST_BYTES = 256 * 1024
_VARIABLE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")
_SECRET = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$)", re.IGNORECASE
)


def read_options(
    path: str | Path,
    known: Sequence[Option],
    *,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Read option values from a YAML file.

    Args:
        path: the file.
        known: options a key may name; `_` and `-` are alike in a key.
        environment: variables that `${NAME}` may name.

    Returns values by option name.

    Raises:
        ValueError: the file cannot be read, or its first fault with `file:line`.
    """
    by_name = {option.name: option for option in known}
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in _pairs(path):
        place = f"{path}:{key_node.start_mark.line + 1}"
        spelled = str(key_node.value).replace("_", "-")
        key, text = (spelled, "") if spelled in by_name else ALIASES.get(spelled, (spelled, ""))
        if key not in by_name:
            raise ValueError(_unknown(place, key_node.value, key, by_name))
        if key in values:
            raise ValueError(f"{place}: {key} is already set on line {lines[key]}: keep one")
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
    """Return the nodes of a file's keys and values. Raises ValueError."""
    try:
        import yaml
    except ImportError:
        raise ValueError("--config needs PyYAML: pip install pyyaml, or give flags") from None
    try:
        text = read_named(path, _MOST_BYTES)
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
    """Refuse anchors and depth before a tree is built: it could be huge, or too deep to walk."""
    import yaml

    depth = 0
    for event in events:
        place = f"{path}:{event.start_mark.line + 1}"
        if getattr(event, "anchor", None) is not None:
            raise ValueError(f"{place}: anchors and aliases are not allowed: write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > 3:  # a nested list or mapping is named with its option later
            raise ValueError(f"{place}: lists and mappings are nested too deeply: one flat mapping")


def _unknown(place: str, spelled: str, key: str, by_name: Mapping[str, Option]) -> str:
    """Return what to say of a key that is no option, with an answer if Megatron has it."""
    known = answer(key)
    if known is not None and (known.nearest is None or known.nearest in by_name):
        return f"{place}: {known.text(key)}"
    return f"{place}: unknown key {spelled!r}{suggest(key, by_name)}"


def _expand(text: str, where: str, environment: Mapping[str, str]) -> str:
    """Replace `${NAME}` by environment variables. Raises ValueError."""

    def replacement(found: re.Match[str]) -> str:
        name = found.group(1)
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
    """Turn a value node into the option's value; `where` names file, line and key."""
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
    known: Sequence[Option],
    *,
    notes: Mapping[str, str] | None = None,
) -> str:
    """Return the YAML text of option values; `read_options` reads it back.

    Args:
        values: values by option name.
        known: the options, in the order to write.
        notes: further comment lines for the top, `name: text`.
    """
    lines = [f"# {name}: {note}" for name, note in (notes or {}).items()]
    section: str | None = None
    for option in known:
        if option.section is not None and option.section != section:
            section = option.section
            lines.append(f"# {section.replace('_', ' ')}")
        lines.append(f"{option.name}: {_text(values[option.name])}")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    # JSON is YAML: null, true, numbers and double-quoted strings mean the same in both, save for
    # characters that YAML wants escaped, and what would be taken for a variable.
    text = json.dumps(value, ensure_ascii=False).replace("${", "$${")
    return re.sub(r"[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]", _escape, text)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found.group()):04x}"
