# SPDX-License-Identifier: Apache-2.0
"""Random JSON Schemas: every answer that ends is valid, and unsupported keywords are refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.http_server import Served

MAX_TOKENS = 512
#: Favours closing characters: random tokens of 256 hardly ever close a value.
CLOSING_BIAS = {str(ord(c)): 8 for c in '"}]'}

NAMES = st.sampled_from(["a", "b", "name", "é", 'with "quotes"', "x y"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-999, 999), st.text('aé"\\\n', max_size=4)
)


def _span(lower: str, upper: str, highest: int) -> st.SearchStrategy[dict[str, int]]:
    """Return no bound, the upper bound, or both bounds with the lower below the upper."""
    pairs = st.tuples(st.integers(0, highest), st.integers(0, highest)).map(sorted)
    two_bounds = pairs.map(lambda pair: {lower: pair[0], upper: pair[1]})
    return st.one_of(st.just({}), two_bounds, two_bounds.map(lambda bounds: {upper: bounds[upper]}))


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    patterns = st.sampled_from(["^[a-f]{2,4}$", "^(yes|no)$", "^[0-9]+-[a-zé]?$", "ab"])
    formats = st.sampled_from(["uuid", "ipv4"])
    return st.one_of(
        _span("minLength", "maxLength", 6),
        patterns.map(lambda keyword: {"pattern": keyword}),
        formats.map(lambda keyword: {"format": keyword}),
    ).map(lambda keyword: {"type": "string", **keyword})


def _numbers() -> st.SearchStrategy[dict[str, Any]]:
    low, high = st.sampled_from(["minimum", "exclusiveMinimum"]), st.integers(-300, 300)
    bounds = st.builds(
        lambda low, start, width, high: {low: start, high: start + width},
        low,
        high,
        st.integers(12, 90),
        st.sampled_from(["maximum", "exclusiveMaximum"]),
    )
    steps = st.sampled_from([{}, {}, {"multipleOf": 3}, {"multipleOf": 5}])
    integers = st.builds(lambda a, b: {"type": "integer", **a, **b}, bounds, steps)
    numbers = bounds.map(lambda bound: {"type": "number", **bound})
    return st.one_of(integers, numbers)


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    items = st.builds(
        lambda items, span: {"type": "array", "items": items, **span},
        inner,
        _span("minItems", "maxItems", 3),
    )
    prefix_items = st.lists(inner, min_size=1, max_size=2)
    tuples = prefix_items.map(
        lambda schemas: {"type": "array", "prefixItems": schemas, "items": False}
    )
    return st.one_of(items, tuples)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def object_schema(
        properties: dict[str, Any], names: list[str], additional: Any
    ) -> dict[str, Any]:
        required = [name for name in names if name in properties]
        schema = {"type": "object", "properties": properties, "required": required}
        return schema if additional is None else {**schema, "additionalProperties": additional}

    return st.builds(
        object_schema,
        st.dictionaries(NAMES, inner, max_size=4),
        st.lists(NAMES, unique=True, max_size=4),
        st.one_of(st.none(), st.just(False), st.just(False), inner),
    )


def _several(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    any_of = st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
    all_of = st.integers(0, 50).map(
        lambda n: {"allOf": [{"type": "integer", "minimum": n}, {"maximum": n + 40}]}
    )
    one_of = st.just({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]})
    # A recursive list: the empty list always ends the recursion.
    tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    return st.one_of(
        any_of, all_of, one_of, st.just({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
    )


def _rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """Move the `$defs` of nested schemas to the root, where `$ref` resolves them."""
    definitions: dict[str, Any] = {}

    def without(node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(node.get("$defs"), dict) and "$ref" in node:
                definitions.update(node["$defs"])
                node = {name: value for name, value in node.items() if name != "$defs"}
            return {name: without(value) for name, value in node.items()}
        return [without(element) for element in node] if isinstance(node, list) else node

    root = without(schema)
    return {**root, "$defs": definitions} if definitions else root


LEAVES = st.one_of(
    _strings(),
    _numbers(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
)
SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.one_of(_arrays(inner), _objects(inner), _several(inner)), max_leaves=6
).map(_rooted)


def check_answers(server: Served, count: int) -> Counter[str]:
    """Request answers for random schemas; return the counts of finish reasons."""
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
            logit_bias=CLOSING_BIAS,
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
def test_answers_validate_against_random_schemas(server: Served, count: int) -> None:
    ends = check_answers(server, count)
    assert ends.keys() <= {"stop", "length"}
    assert sum(ends.values()) >= count
    assert ends["stop"] >= 0.9 * sum(ends.values()), ends
