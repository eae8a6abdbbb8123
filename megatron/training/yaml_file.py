# SPDX-License-Identifier: Apache-2.0
"""YAML files of options: strict reading with file and line, and writing that reads back the same.

A file is one flat mapping from option name to value. The text of a value is parsed by the
option's own type, so `1e-4` is a number although PyYAML alone reads it as a string. Unknown keys,
duplicate keys, nested mappings and tags are errors. Only the parser's node tree is used: nothing
in a file can construct an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training.schema import Option, suggest


def read_options(path: str | Path, known: Sequence[Option]) -> dict[str, Any]:
    """Read option values from a YAML file.

    Args:
        path: the file.
        known: options a key may name; `_` and `-` are alike in a key.

    Returns values by option name.

    Raises:
        ValueError: the file cannot be read, or its first fault with `file:line`.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{line}: not valid YAML: {_first_line(error)}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}:1: expected `option: value` lines")
    by_name = {option.name: option for option in known}
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"{path}:{line}: a key must be an option's name")
        key = key_node.value.replace("_", "-")
        if key not in by_name:
            raise ValueError(
                f"{path}:{line}: unknown key {key_node.value!r}{suggest(key, by_name)}"
            )
        if key in values:
            raise ValueError(f"{path}:{line}: {key} is already set on line {lines[key]}: keep one")
        values[key] = _value(
            by_name[key], value_node, f"{path}:{value_node.start_mark.line + 1}: {key}"
        )
        lines[key] = line
    return values


def _first_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _value(option: Option, node: Any, where: str) -> Any:
    """Turn a value node into the option's value; `where` names file, line and key."""
    import yaml

    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if isinstance(node, yaml.SequenceNode) and not option.many:
        raise ValueError(f"{where} takes one value, not a list")
    texts = []
    for item in [node, *nodes]:
        if not item.tag.startswith("tag:yaml.org,2002:") or "python" in item.tag:
            raise ValueError(f"{where}: the tag {item.tag} is not allowed: write a plain value")
    for item in nodes:
        if not isinstance(item, yaml.ScalarNode):
            raise ValueError(f"{where} must be a plain value, not a nested one")
        plain_null = item.style is None and item.value.lower() in ("", "~", "null")
        if plain_null and not option.optional:
            raise ValueError(f"{where} has no value: give one or remove the line")
        if item.style is not None and option.optional and option.kind is str and not option.choices:
            return item.value  # quoted: the string itself, even "none"
        texts.append("none" if plain_null else item.value)
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
    # characters that YAML wants escaped.
    return re.sub(
        r"[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]", _escape, json.dumps(value, ensure_ascii=False)
    )


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found.group()):04x}"
