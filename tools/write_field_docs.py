# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/serving-fields.md: every field of the bodies of the server's routes, its
values and its effect, from the classes of the bodies. The introduction stands in the page.

python tools/write_field_docs.py
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from megatron.inference.server.app import ADMIN_ROUTES, API_ROUTES
from megatron.inference.server.protocol.body import TOKEN_ID, Body, ServedValues
from tools.write_flag_docs import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving-fields.md"

_ROUTES = "## Routes\n"
_HEADER = ["field", "values", "effect"]
_REFERENCES = "#/$defs/"
#: Longest texts that are limited by the size of a body only.
_UNLIMITED = 1 << 20

Schema = Mapping[str, Any]


def _bodies(annotation: Any) -> Iterator[type[Body]]:
    """Yield the classes of objects in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _bodies(argument)


def _declared_fields(body: type[Body]) -> dict[str, FieldInfo]:
    """Return the fields that a class declares itself, or changes."""
    declared = inspect.get_annotations(body)
    return {name: field for name, field in body.model_fields.items() if name in declared}


def _bases(body: type[Body]) -> list[type[Body]]:
    """Return the base classes whose fields a class has, too."""
    return [base for base in body.__bases__ if issubclass(base, Body) and base.model_fields]


def _nested(body: type[Body]) -> Iterator[type[Body]]:
    """Yield the classes of the objects in the fields that a class declares itself."""
    for field in _declared_fields(body).values():
        yield from _bodies(field.annotation)


def documented_classes() -> dict[type[Body], list[str]]:
    """Return every class of the page with its routes: bodies of routes, then their base classes and
    the classes of nested objects."""
    routes: dict[type[Body], list[str]] = {}
    for method, path, _, body in (*API_ROUTES, *ADMIN_ROUTES):
        if body is not None:
            routes.setdefault(body, []).append(f"`{method} {path}`")
    queue = list(routes)
    for body in queue:
        for related in (*_bases(body), *_nested(body)):
            if related not in routes:
                routes[related] = []
                queue.append(related)
    return routes


def _bounds(schema: Schema) -> str:
    """Return the bounds of a number."""
    texts = {
        "minimum": "from {:,}",
        "exclusiveMinimum": "above {:,}",
        "maximum": "to {:,}",
        "exclusiveMaximum": "below {:,}",
    }
    return " ".join(text.format(schema[name]) for name, text in texts.items() if name in schema)


def _size(schema: Schema, smallest: str, largest: str) -> str:
    """Return the bounds of a size in parentheses; a bound of a million or more is left out."""
    low, high = schema.get(smallest, 0), schema.get(largest, _UNLIMITED)
    if high < _UNLIMITED:
        return f" ({low} to {high:,})" if low else f" (up to {high:,})"
    return f" (at least {low})" if low else ""


def _number_text(schema: Schema) -> tuple[str, str]:
    """Return the kind of a number with its bounds, in the singular and the plural."""
    if schema.get("title") == TOKEN_ID:
        return f"a {TOKEN_ID}", f"{TOKEN_ID}s"
    low, end = schema.get("minimum"), schema.get("exclusiveMaximum")
    for bits in (32, 64):
        if end == 1 << (bits - 1) and low == -end:
            return f"a {bits}-bit integer", f"{bits}-bit integers"
    bounds = _bounds(schema)
    singular = "an integer" if schema["type"] == "integer" else "a number"
    return f"{singular} {bounds}".strip(), f"{singular.split()[1]}s {bounds}".strip()


def values_text(schema: Schema, *, plural: bool = False) -> str:
    """Return the values that a JSON schema allows, in Markdown.

    Args:
        schema: the schema.
        plural: the values are the elements of a list.
    """
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REFERENCES)
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf"):
        if union in schema:
            members = [values_text(member, plural=plural) for member in schema[union]]
            members = list(dict.fromkeys(filter(None, members)))
            return (", or " if any(" of " in member for member in members) else " or ").join(
                members
            )
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return (
            ", ".join(f"`{json.dumps(value)}`" for value in values if value is not None) or "none"
        )
    kind = schema.get("type", "any")
    if kind == "array":
        size, elements = _size(schema, "minItems", "maxItems"), schema["items"]
        return f"{'lists' if plural else 'a list'}{size} of {values_text(elements, plural=True)}"
    if kind == "object":
        size = _size(schema, "minProperties", "maxProperties")
        return f"{'objects' if plural else 'an object'}{size}"
    if kind == "string":
        size = _size(schema, "minLength", "maxLength")
        pattern = f" like `{schema['pattern']}`" if "pattern" in schema else ""
        return f"{'texts' if plural else 'a text'}{size}{pattern}"
    if kind in ("integer", "number"):
        return _number_text(schema)[plural]
    return {"boolean": "`true`, `false`", "null": "", "any": "any"}[kind]


def effect_text(field: FieldInfo) -> str:
    """Return the effect of a field, in Markdown."""
    is_kind = typing.get_origin(field.annotation) is typing.Literal
    if is_kind and len(typing.get_args(field.annotation)) == 1 and not field.description:
        return "Kind of the object."
    served = [m for m in _metadata(field) if isinstance(m, ServedValues)]
    fixes = [f"Other values are refused: {annotation.fix}." for annotation in served]
    return " ".join([*filter(None, [field.description]), *fixes])


def _metadata(field: FieldInfo) -> Sequence[Any]:
    """Return the annotations of a field, and of the members of a union."""
    arguments = typing.get_args(field.annotation)
    return [*field.metadata, *(m for a in arguments for m in getattr(a, "__metadata__", ()))]


def _cell(text: str) -> str:
    """Return a text as a cell of a table; options are set as code."""
    return re.sub(r"(?<![`\w-])(--[a-z][a-z-]*)", r"`\1`", " ".join(text.split())).replace(
        "|", "\\|"
    )


def _rows(body: type[Body]) -> list[list[str]]:
    """Return the rows of the fields that a class declares itself."""
    properties = body.model_json_schema(ref_template=_REFERENCES + "{model}")["properties"]
    rows = []
    for attribute, field in _declared_fields(body).items():
        name = field.alias or attribute
        values = values_text(properties[name])
        if field.is_required():
            values += "; required"
        elif field.default is not None:
            values += f"; `{json.dumps(field.default)}` by default" if field.default != "" else ""
        rows.append([f"`{name}`", _cell(values), _cell(effect_text(field))])
    return rows


def _section(body: type[Body], routes: Sequence[str]) -> str:
    """Return the section of one class."""
    lines = [f"### {', '.join(routes)}" if routes else f"### {body.__name__}", ""]
    if not routes:
        lines += [" ".join((body.__doc__ or "").split()), ""]
    if bases := _bases(body):
        links = " and ".join(_link(base) for base in bases)
        lines += [f"The fields of {links}, and:" if _rows(body) else f"The fields of {links}.", ""]
    text = "\n".join(lines) + "\n"
    return text + (table(_HEADER, _rows(body)) if _rows(body) else "")


def _link(body: type[Body]) -> str:
    routes = documented_classes()[body]
    if not routes:
        return f"[{body.__name__}](#{body.__name__.lower()})"
    anchor = re.sub(r"[^a-z0-9_ -]", "", ", ".join(routes).lower()).replace(" ", "-")
    return f"[{', '.join(routes)}](#{anchor})"


def page(text: str) -> str:
    """Return the text of docs/serving-fields.md with new tables."""
    classes = documented_classes()
    sections = [text[: text.index(_ROUTES)], _ROUTES, "\n"]
    sections += [_section(body, routes) for body, routes in classes.items() if routes]
    sections += ["## Shared fields and objects\n\n"]
    sections += [_section(body, routes) for body, routes in classes.items() if not routes]
    return "".join(sections).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
