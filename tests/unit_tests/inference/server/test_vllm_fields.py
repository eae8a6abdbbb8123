# SPDX-License-Identifier: Apache-2.0
"""The fields that vLLM adds to OpenAI's routes, by their effect on a model with known outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_server import END, Served, error_of, prompt_of, served
from tests.support.scripted_model import TEMPLATE, Scripted

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Served]:
    """A server whose answers a test chooses, with a template that shows the conversation."""
    with served(
        Scripted(),
        template={"source": TEMPLATE, "name": "shows all"},
        formats={"tools": "hermes", "reasoning": "qwen3"},
    ) as running:
        yield running


def completion(server: Served, prompt: Any = "a", **fields: Any) -> dict[str, Any]:
    """Return the first choice of a greedy completion."""
    fields = {"temperature": 0, "max_tokens": 8, **fields}
    return server.ok("/v1/completions", prompt=prompt, **fields)["choices"][0]


def test_min_tokens_delays_stop_tokens_and_stop_strings(server: Served) -> None:
    assert completion(server, "|")["text"] == "}~"
    longer = server.ok("/v1/completions", prompt="|", temperature=0, max_tokens=8, min_tokens=5)
    assert longer["usage"]["completion_tokens"] >= 5
    assert completion(server, stop=["d"])["text"] == "bc"
    assert completion(server, stop=["d"], min_tokens=4, ignore_eos=True)["text"] == "bcdefghi"


def test_allowed_tokens_and_bad_words(server: Served) -> None:
    allowed = [ord("x"), ord("y")]
    assert completion(server, "w", allowed_token_ids=allowed, max_tokens=2)["text"] == "xy"
    assert set(completion(server, allowed_token_ids=allowed)["text"]) <= {"x", "y"}
    text = completion(server, bad_words=["d"])["text"]
    assert text.startswith("bc")
    assert "d" not in text
    # Of a sequence only the last token is banned, after the others.
    assert completion(server, "c", bad_words=["de"], max_tokens=1)["text"] == "d"
    assert "de" not in completion(server, "c", bad_words=["de"])["text"]


def test_constraints_that_allow_no_token_are_refused(server: Served) -> None:
    fields = {"allowed_token_ids": [97], "bad_words": ["a"], "max_tokens": 2}
    error = error_of(server.post("/v1/completions", prompt="a", **fields))
    assert error["param"] == "allowed_token_ids"


def test_stop_string_in_the_output(server: Served) -> None:
    stopped = completion(server, stop=["de"], include_stop_str_in_output=True)
    assert (stopped["text"], stopped["stop_reason"]) == ("bcde", "de")


def test_token_ids_are_returned(server: Served) -> None:
    choice = completion(server, return_token_ids=True, max_tokens=2, n=2)
    assert choice["prompt_token_ids"] == [97]
    assert choice["token_ids"] == [98, 99]
    chunks = server.chunks(
        "/v1/completions", prompt="a", temperature=0, max_tokens=2, return_token_ids=True
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == [97]
    assert [token for choice in choices for token in choice["token_ids"]] == [98, 99]


def test_chat_returns_token_ids(scripted: Served) -> None:
    scripted.model.say("ok")
    answer = scripted.ok(
        CHAT, messages=[USER], temperature=0, return_token_ids=True, prompt_logprobs=1
    )
    assert bytes(answer["prompt_token_ids"]).decode() == "[user hi][answer]"
    assert answer["choices"][0]["token_ids"] == [*b"ok", END]
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    scripted.model.say("ok")
    chunks = scripted.chunks(CHAT, messages=[USER], temperature=0, return_token_ids=True)
    ids = [t for chunk in chunks for c in chunk["choices"] for t in c.get("token_ids", ())]
    assert ids[:2] == [*b"ok"]


def test_prompt_logprobs_have_the_tokens_and_their_alternatives(server: Served) -> None:
    choice = completion(server, "abd", prompt_logprobs=1, logprobs=0, max_tokens=1)
    unscored, second, third = choice["prompt_logprobs"]
    assert unscored is None
    assert list(second) == ["98"]
    assert second["98"]["rank"] == 1
    assert second["98"]["decoded_token"] == "b"
    # `d` follows `b` with a low probability, so the alternative is `c`. All tokens but `c` are
    # equally probable, and 99 of them have lower ids than `d`.
    assert list(third) == ["100", "99"]
    assert third["99"]["rank"] == 1
    assert third["100"]["rank"] == 101
    assert third["99"]["logprob"] > third["100"]["logprob"]
    assert choice["logprobs"]["top_logprobs"] == [{}]


def test_prompt_of_tokens_is_scored_without_new_tokens(server: Served) -> None:
    prompt = [[97, 98, 99], [120, 121]]
    answer = server.ok("/v1/completions", prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "xy"]
    assert answer["usage"]["completion_tokens"] == 0
    for choice, tokens in zip(answer["choices"], prompt, strict=True):
        scored = completion(server, tokens, max_tokens=1, echo=True, logprobs=1)["logprobs"]
        assert choice["finish_reason"] == "length"
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert choice["logprobs"][column] == scored[column][:-1]


@pytest.mark.parametrize("scored", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, {}])
def test_whole_context_is_scored(server: Served, scored: dict[str, Any]) -> None:
    prompt = [97] * 5000
    fields = {"prompt": prompt, **scored}
    [choice] = server.ok("/v1/completions", max_tokens=0, **fields)["choices"]
    if "echo" in scored:
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt)
    if "prompt_logprobs" in scored:
        assert len(choice["prompt_logprobs"]) == len(prompt)
    assert "5000" in error_of(server.post("/v1/completions", max_tokens=1, **fields))["message"]


@pytest.mark.parametrize("fields", [{"do_sample": False}, {"do_sample": False, "temperature": 0}])
def test_do_sample_false_is_greedy(server: Served, fields: dict[str, Any]) -> None:
    answer = server.ok("/v1/completions", prompt="a", max_tokens=20, top_p=1, **fields)
    assert answer["choices"][0]["text"] == "bcdefghijklmnopqrstu"


def test_prompts_are_truncated_from_the_left(server: Served) -> None:
    choice = completion(server, "abcdef", truncate_prompt_tokens=2, return_token_ids=True)
    assert choice["prompt_token_ids"] == [*b"ef"]
    long = completion(server, "a" * 6000, truncate_prompt_tokens=-1, return_token_ids=True)
    assert len(long["prompt_token_ids"]) == 5000 - 8


def test_usage_in_every_chunk(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.chunks("/v1/completions", prompt="a", max_tokens=3, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 3


def test_cache_salt_separates_the_prefixes_of_tenants(server: Served) -> None:
    """A tenant must not learn from the usage or the time what another tenant has sent."""

    def cached(prompt: str, **fields: Any) -> int:
        usage = server.ok("/v1/completions", prompt=prompt, max_tokens=1, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    secret = "the secret of the first tenant, " * 20
    assert cached(secret, cache_salt="first") == 0
    assert cached(secret, cache_salt="first") > 500
    assert cached(secret, cache_salt="second") == 0
    assert cached(secret) == 0
    assert cached(secret, cache_salt="second") > 500


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_cache_salt_separates_prefixes_of_chats(server: Served, route: str) -> None:
    text = f"the secret of a tenant of {route}, " * 20
    turns = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    body = {"input": text, "max_output_tokens": 1} if route == "/v1/responses" else turns

    def cached(**fields: Any) -> int:
        usage = server.ok(route, **body, **fields)["usage"]
        for name in ("input_tokens_details", "prompt_tokens_details"):
            usage = usage.get(name, usage)
        names = ("cached_tokens", "cache_read_input_tokens")
        return next(usage[name] for name in names if name in usage)

    counts = [cached(cache_salt=salt) for salt in ("first", "first", "second")] + [cached()]
    assert [count > 500 for count in counts] == [False, True, False, False]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_regex": "[ac]+b"}, r"[ac]+b"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": {"type": "object", "properties": {}, "additionalProperties": False}}, ""),
        ({"guided_json": '{"const": 5}'}, "5"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
    ],
)
def test_guided_fields_are_structured_outputs(
    server: Served, fields: dict[str, Any], text: str
) -> None:
    choice = completion(server, max_tokens=40, **fields)
    (name,) = fields
    value = fields[name]
    value = json.loads(value) if name == "guided_json" and isinstance(value, str) else value
    structured = {"structured_outputs": {name.removeprefix("guided_"): value}}
    assert completion(server, max_tokens=40, **structured)["text"] == choice["text"]
    if text and name != "guided_regex":
        assert choice["text"] in text.split("|")


def test_white_space_in_json_is_bounded_to_one_blank(server: Served) -> None:
    """The model prefers newlines, which it may write only where the pattern allows them."""
    newline = {"logit_bias": {str(ord("\n")): 100}, "max_tokens": 60}
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1}
    compact = completion(server, structured_outputs={"json": schema}, **newline)
    assert "\n" not in compact["text"]
    pattern = {"json": schema, "whitespace_pattern": "[ \n]{0,4}"}
    assert "\n" in completion(server, structured_outputs=pattern, **newline)["text"]


@pytest.mark.parametrize("route", [CHAT, "/v1/messages"])
def test_last_message_of_the_assistant_is_continued(scripted: Served, route: str) -> None:
    fields: dict[str, Any] = {"messages": [USER, {"role": "assistant", "content": "Once "}]}
    if route == CHAT:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        fields |= {"model": "next-byte", "max_tokens": 9}
    assert prompt_of(scripted, route, **fields) == "[user hi][assistant Once "


def test_generation_prompt_can_be_left_out(scripted: Served) -> None:
    prompt = prompt_of(scripted, CHAT, messages=[USER], add_generation_prompt=False)
    assert prompt == "[user hi]"
