# SPDX-License-Identifier: Apache-2.0
"""Answers of the routes: texts, logprobs, several outputs, streams, usage, metrics."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from tests.support.http_server import END, Served, served

LIKELY = 5 - math.log(math.exp(5) + END)


def test_completion_continues_the_prompt(server: Served) -> None:
    completion = server.ok("/v1/completions", prompt="abc", max_tokens=3, temperature=0)
    (choice,) = completion["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("def", "length")
    assert completion["model"] == "next-byte"
    assert completion["usage"]["prompt_tokens"] == completion["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ([97, 98], ["cd"]),
        (["a", "x"], ["bc", "yz"]),
        ([[97], [120, 121]], ["bc", "z{"]),
        ("", ["\x01\x02"]),  # an empty prompt becomes the end-of-document token
    ],
)
def test_prompts_are_texts_ids_or_lists(server: Served, prompt: Any, texts: list[str]) -> None:
    completion = server.ok("/v1/completions", prompt=prompt, max_tokens=2, temperature=0)
    assert [c["text"] for c in completion["choices"]] == texts
    assert [c["index"] for c in completion["choices"]] == list(range(len(texts)))


def test_usage_adds_up_over_prompts_and_outputs(server: Served) -> None:
    completion = server.ok("/v1/completions", prompt=["a", "xyz"], n=2, max_tokens=5, temperature=0)
    assert len(completion["choices"]) == 4
    assert completion["usage"]["prompt_tokens"] == 4
    assert completion["usage"]["completion_tokens"] == 20
    long = "q" * 64
    server.ok("/v1/completions", prompt=long, max_tokens=1)
    completion = server.ok("/v1/completions", prompt=long, max_tokens=1)
    assert completion["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


def test_every_token_has_logprobs(server: Served) -> None:
    completion = server.ok(
        "/v1/completions", prompt="ab", max_tokens=3, temperature=0, logprobs=2, echo=True
    )
    (choice,) = completion["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == "abcde"
    assert scores["tokens"] == list("abcde")
    assert scores["text_offset"] == [0, 1, 2, 3, 4]
    assert scores["token_logprobs"] == [None, *[pytest.approx(LIKELY, abs=1e-5)] * 4]
    assert scores["top_logprobs"][0] is None
    assert [max(top, key=top.get) for top in scores["top_logprobs"][1:]] == list("bcde")
    plain = server.ok("/v1/completions", prompt="ab", max_tokens=3, temperature=0, logprobs=0)
    assert len(plain["choices"][0]["logprobs"]["token_logprobs"]) == 3


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "ef"}, "bcd", "stop"),
        ({"stop": ["zz", "d"]}, "bc", "stop"),
        ({"stop_token_ids": [100]}, "bc", "stop"),
        ({"logit_bias": {"98": -100, "122": 10}}, "zz", "length"),
        ({"frequency_penalty": 2, "presence_penalty": 2, "max_tokens": 3}, "bcd", "length"),
    ],
)
def test_sampling_fields_change_the_text(
    server: Served, fields: dict[str, Any], text: str, reason: str
) -> None:
    request = {"max_tokens": 2 if "logit_bias" in fields else 9, "temperature": 0, **fields}
    (choice,) = server.ok("/v1/completions", prompt="a", **request)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)


def test_ignore_eos_continues_after_the_end_of_document(server: Served) -> None:
    fields = {"prompt": "|", "max_tokens": 4, "temperature": 0}
    (choice,) = server.ok("/v1/completions", **fields)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("}~", "stop")
    (choice,) = server.ok("/v1/completions", **fields, ignore_eos=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("}~\x01", "length")


def test_equal_seeds_repeat_the_text_and_others_differ(server: Served) -> None:
    request = {"prompt": "a", "max_tokens": 12, "temperature": 2.0}

    def text(**fields: Any) -> str:
        return server.ok("/v1/completions", **request, **fields)["choices"][0]["text"]

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert text() != text()
    assert text(seed=5, top_k=1) == text(seed=6, top_p=1e-9) == text(min_p=1.0) == "bcdefghijklm"


def test_streamed_chunks_add_up_to_the_whole_answer(server: Served) -> None:
    fields = {
        "prompt": [[0xE2 - 1], [97]],
        "n": 2,
        "max_tokens": 24,
        "temperature": 1.5,
        "seed": 3,
        "logprobs": 1,
        "stop": ["\x05\x06", "no"],
    }
    whole = server.ok("/v1/completions", **fields)
    events = server.chunks("/v1/completions", **fields, stream_options={"include_usage": True})
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        chunks = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(p["text"] for p in chunks) == choice["text"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [v for p in chunks for v in p["logprobs"][name]] == values
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])


def test_tokenize_and_detokenize_convert_text_and_ids(server: Served) -> None:
    assert server.ok("/tokenize", prompt="ab")["tokens"] == [97, 98]
    assert server.ok("/detokenize", tokens=[97, 98])["prompt"] == "ab"
    tokenized = server.ok("/tokenize", messages=[{"role": "user", "content": "é"}])
    assert bytes(tokenized["tokens"]).decode() == (
        "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    )


def test_model_is_listed_and_unknown_models_are_404(server: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["next-byte"]
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["id"] == "next-byte"
    assert server.http.get("/v1/models/next-byte").json() == card
    assert server.http.get("/v1/models/another").status_code == 404
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = server.post(path, model="gpt-9", **fields)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_metrics_count_served_requests_and_tokens() -> None:
    with served() as server:
        server.ok("/v1/completions", prompt="ab", n=2, max_tokens=3, temperature=0)
        values = server.metrics()
        assert values["megatron:generation_tokens_total"] == 6
        assert values["megatron:prompt_tokens_total"] == 2
        assert values['megatron:request_success_total{finished_reason="length"}'] == 2
        assert values["megatron:time_to_first_token_seconds_count"] == 2
        assert values["megatron:inter_token_latency_seconds_count"] == 4
        assert values["megatron:num_requests_running"] == 0
        assert values["megatron:engine_steps_total"] >= 3
        # Hits divided by queries is the hit rate for any number of outputs per prompt.
        lower_prompt, upper_prompt = "abcdefgh" * 5, "ABCDEFGH" * 3
        for prompt in ([lower_prompt, upper_prompt], lower_prompt, lower_prompt[:37] + "zzz"):
            server.ok("/v1/completions", prompt=prompt, n=3, max_tokens=2, temperature=0)
        values = server.metrics()
    queries = values["megatron:prefix_cache_queries_total"]
    assert queries == values["megatron:prompt_tokens_total"] == 2 + 3 * 40 + 24
    # The second and the third request hit two blocks of 16 tokens each.
    assert values["megatron:prefix_cache_hits_total"] == 2 * 32
