# SPDX-License-Identifier: Apache-2.0
"""Random JSON Schemas: every answer that ends is valid, and unsupported keywords are refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.http_server import Served, served

MAX_TOKENS = 512
#: Ends what is open: random tokens of 256 hardly ever would.
LEANS = {str(ord(c)): 8 for c in '"}]'}
#: Keywords of JSON Schema that are no notes and cannot be enforced.
UNSUPPORTED = (
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "array", "contains": {}, "minContains": 1},
    {"type": "array", "contains": {}, "maxContains": 1},
    {"type": "array", "unevaluatedItems": False},
    {"type": "object", "propertyNames": {"minLength": 2}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {}}},
    {"type": "object", "dependencies": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"$dynamicRef": "#a"},
    {"type": "string", "format": "nonsense"},
)

NAMES = st.sampled_from(["a", "b", "name", "é", 'with "quotes"', "x y"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-999, 999), st.text('aé"\\\n', max_size=4)
)


def _span(least: str, most: str, highest: int) -> st.SearchStrategy[dict[str, int]]:
    """Return bounds of which neither, one or both are there; the lower one is the lower."""
    pairs = st.tuples(st.integers(0, highest), st.integers(0, highest)).map(sorted)
    both = pairs.map(lambda pair: {least: pair[0], most: pair[1]})
    return st.one_of(st.just({}), both, both.map(lambda found: {most: found[most]}))


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    patterns = st.sampled_from(["^[a-f]{2,4}$", "^(yes|no)$", "^[0-9]+-[a-zé]?$", "ab"])
    formats = st.sampled_from(["uuid", "ipv4"])
    return st.one_of(
        _span("minLength", "maxLength", 6),
        patterns.map(lambda found: {"pattern": found}),
        formats.map(lambda found: {"format": found}),
    ).map(lambda found: {"type": "string", **found})


def _numbers() -> st.SearchStrategy[dict[str, Any]]:
    low, high = st.sampled_from(["minimum", "exclusiveMinimum"]), st.integers(-300, 300)
    bounds = st.builds(
        lambda low, at, width, high: {low: at, high: at + width},
        low,
        high,
        st.integers(12, 90),
        st.sampled_from(["maximum", "exclusiveMaximum"]),
    )
    steps = st.sampled_from([{}, {}, {"multipleOf": 3}, {"multipleOf": 5}])
    integers = st.builds(lambda a, b: {"type": "integer", **a, **b}, bounds, steps)
    numbers = bounds.map(lambda found: {"type": "number", **found})
    return st.one_of(integers, numbers)


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    items = st.builds(
        lambda items, span: {"type": "array", "items": items, **span},
        inner,
        _span("minItems", "maxItems", 3),
    )
    firsts = st.lists(inner, min_size=1, max_size=2)
    tuples = firsts.map(lambda found: {"type": "array", "prefixItems": found, "items": False})
    return st.one_of(items, tuples)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def described(properties: dict[str, Any], needed: list[str], more: Any) -> dict[str, Any]:
        required = [name for name in needed if name in properties]
        found = {"type": "object", "properties": properties, "required": required}
        return found if more is None else {**found, "additionalProperties": more}

    return st.builds(
        described,
        st.dictionaries(NAMES, inner, max_size=4),
        st.lists(NAMES, unique=True, max_size=4),
        st.one_of(st.none(), st.just(False), st.just(False), inner),
    )


def _several(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    any_of = st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found})
    all_of = st.integers(0, 50).map(
        lambda n: {"allOf": [{"type": "integer", "minimum": n}, {"maximum": n + 40}]}
    )
    one_of = st.just({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]})
    # A list of itself: its end is always allowed.
    tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    return st.one_of(
        any_of, all_of, one_of, st.just({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
    )


def _rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the definitions of its parts where `$ref` looks for them."""
    found: dict[str, Any] = {}

    def without(part: Any) -> Any:
        if isinstance(part, dict):
            if isinstance(part.get("$defs"), dict) and "$ref" in part:
                found.update(part["$defs"])
                part = {name: value for name, value in part.items() if name != "$defs"}
            return {name: without(value) for name, value in part.items()}
        return [without(one) for one in part] if isinstance(part, list) else part

    plain = without(schema)
    return {**plain, "$defs": found} if found else plain


LEAVES = st.one_of(
    _strings(),
    _numbers(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda found: {"enum": found}),
    SCALARS.map(lambda found: {"const": found}),
)
SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.one_of(_arrays(inner), _objects(inner), _several(inner)), max_leaves=6
).map(_rooted)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found


def check_answers(server: Served, count: int) -> Counter[str]:
    """Have random schemas answered; return how the answers ended."""
    ends: Counter[str] = Counter()

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS)
    def check(schema: dict[str, Any]) -> None:
        response = server.post(
            "/v1/completions",
            prompt="a",
            max_tokens=MAX_TOKENS,
            seed=sum(ends.values()),
            logit_bias=LEANS,
            structured_outputs={"json": schema},
        )
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        ends[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            validator = jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.FormatChecker()
            )
            validator.validate(json.loads(choice["text"]))

    check()
    return ends


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_answers_follow_random_schemas(server: Served, count: int) -> None:
    ends = check_answers(server, count)
    assert ends.keys() <= {"stop", "length"}
    assert sum(ends.values()) >= count
    assert ends["stop"] >= 0.9 * sum(ends.values()), ends


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=lambda schema: list(schema)[-1])
def test_keywords_that_cannot_be_enforced_are_refused(
    server: Served, schema: dict[str, Any]
) -> None:
    response = server.post("/v1/completions", prompt="a", structured_outputs={"json": schema})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs"
