# SPDX-License-Identifier: Apache-2.0
"""Comparing the model a checkpoint was saved from with the one that is to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compare_architecture(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return one line per field in which two models differ, e.g. from `extra["model"]`.

    Nested mappings are compared field by field under dotted names. A tuple equals the list that
    JSON makes of it.
    """
    before, after = _flatten(saved), _flatten(wanted)
    return [
        f"{name}: {_shown(before, name)} in the checkpoint, {_shown(after, name)} in the model"
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or before[name] != after[name]
    ]


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = _as_json(value)
    return flat


def _as_json(value: Any) -> Any:
    return [_as_json(item) for item in value] if isinstance(value, tuple | list) else value


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name]) if name in fields else "absent"
