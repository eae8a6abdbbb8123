# SPDX-License-Identifier: Apache-2.0
"""docs/serving-fields.md lists every field of the routes, as their classes declare it."""

from __future__ import annotations

from megatron.inference.server.app import ADMIN_ROUTES, API_ROUTES
from tools.write_field_docs import PAGE, documented_classes, effect_text, page, values_text


def test_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python -m tools.write_field_docs"


def test_every_field_has_an_effect() -> None:
    classes = documented_classes()
    assert {body for *_, body in (*API_ROUTES, *ADMIN_ROUTES) if body is not None} < classes.keys()
    silent = [
        f"{body.__name__}.{name}"
        for body in classes
        for name, field in body.model_fields.items()
        if not effect_text(field)
    ]
    assert silent == []


def test_page_shows_bounds_and_refused_values() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "an integer from 1 to 16 |" in rows["`n`"]
    assert "`1` | Other values are refused" in rows["`typical_p`"]
    assert "any | Accepted" in rows["`service_tier`"]
    assert "[StreamOptions](#streamoptions)" in rows["`stream_options`"]


def test_values_of_schemas() -> None:
    many = {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 4}
    assert values_text(many) == "a list (up to 4) of texts (up to 9)"
    assert values_text({"anyOf": [{"type": "boolean"}, {"type": "null"}]}) == "`true`, `false`"
    bounds = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert values_text(bounds) == "a number above 0 to 1"
    assert values_text({"type": "integer", "title": "token id"}) == "a token id"
