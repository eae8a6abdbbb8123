# SPDX-License-Identifier: Apache-2.0
"""Beam search over HTTP against `generate` of transformers, and against all sequences of a tiny
vocabulary."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.cli.launch import Launch
from megatron.cli.tokenizers import train_bpe
from megatron.core.inference import EngineConfig, OutputDelta
from megatron.inference import ModelSource
from megatron.inference.load_model import load_checkpoint_model
from megatron.inference.server.beam_search import BeamSearchParams, BeamState
from tests.support.hf_folders import make_model, save_folder
from tests.support.http_server import END, Served, error_of, served, until
from tests.support.inputs import generator, one_thread

MAX_TOKENS = 12
PROMPT = list(torch.randint(END, (40,), generator=generator(5)).tolist())
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def hf_model() -> Any:
    return make_model("llama-3to1", vocab_size=END + 1, eos_token_id=END)


@pytest.fixture(scope="module")
def server(hf_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    save_folder(hf_model, folder)
    train_bpe(["abc"] * 3, END + 1, folder / "tokenizer.json")
    source = ModelSource(load=str(folder), device="cpu")
    with load_checkpoint_model(source, Launch.from_environment({})) as loaded:
        config = EngineConfig(num_blocks=256, block_size=16)
        with served(loaded.generator(2048), engine=config, max_length=100) as running:
            yield running
            assert running.engine.unfinished == 0
            assert running.engine.scheduler.kv_cache.pool.references == 0


def search(server: Served, prompt: Any = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a beam search."""
    fields = {"max_tokens": MAX_TOKENS, "logprobs": 1, "return_token_ids": True, **fields}
    answer = server.ok("/v1/completions", prompt=prompt, use_beam_search=True, **fields)
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    assert answer["usage"]["completion_tokens"] == sum(lengths)
    return answer["choices"]


def reference(
    hf_model: Any, stops: list[int], **options: Any
) -> tuple[list[list[int]], list[float]]:
    """Return the new tokens and the scores of the beams of transformers."""
    with one_thread(), torch.no_grad():
        beams = hf_model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=stops or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    sequences = []
    for sequence in beams.sequences[:, len(PROMPT) :].tolist():
        end = next((n + 1 for n, token in enumerate(sequence) if token in stops), MAX_TOKENS)
        sequences.append(sequence[:end])
    return sequences, beams.sequences_scores.tolist()


@pytest.mark.parametrize(
    ("num_stops", "early_stopping", "length_penalty"),
    [
        (0, False, 1.0),
        (1, False, 0.0),
        (6, False, 1.0),
        (6, False, 2.5),
        (6, True, 1.0),
        (1, True, -1.5),
        (6, "never", 1.0),
        (6, "never", -1.5),
        (1, "never", 2.5),
    ],
)
def test_beams_are_those_of_transformers(
    server: Served, hf_model: Any, num_stops: int, early_stopping: Any, length_penalty: float
) -> None:
    (likely_tokens,), _ = reference(hf_model, [], num_beams=5)
    stops = sorted(set(likely_tokens[2:]))[:num_stops]
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    for width, n in ((2, 2), (5, 3), (8, 8)):
        tokens, scores = reference(
            hf_model, stops, num_beams=width, num_return_sequences=n, **options
        )
        fields = {"n": n, "best_of": width, "stop_token_ids": stops, "ignore_eos": True, **options}
        choices = search(server, **fields)
        assert [choice["token_ids"] for choice in choices] == tokens
        for choice, sequence, score in zip(choices, tokens, scores, strict=True):
            total = math.fsum(choice["logprobs"]["token_logprobs"])
            # Per token: a negative penalty multiplies the rounding of the sum.
            mean = score * len(sequence) ** (length_penalty - 1)
            assert total / len(sequence) == pytest.approx(mean, abs=1e-4)
            is_stopped = sequence[-1] in stops
            assert choice["finish_reason"] == ("stop" if is_stopped else "length")
            text = bytes(sequence[: len(sequence) - is_stopped]).decode(errors="replace")
            assert choice["text"] == text


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 3.0])
def test_wide_beam_finds_the_best_of_all_sequences(length_penalty: float) -> None:
    """With a beam as wide as the number of all prefixes, the search is exhaustive."""
    vocab_size, stop, max_new_tokens, width = 4, 3, 3, 16

    def logprobs(tokens: tuple[int, ...]) -> list[float]:
        seed = generator(1 + sum(5**n * (token + 1) for n, token in enumerate(tokens)))
        return (3 * torch.randn(vocab_size, generator=seed)).double().log_softmax(0).tolist()

    state = BeamState(
        params=BeamSearchParams(
            beam_width=width, length_penalty=length_penalty, early_stopping="never"
        ),
        max_new_tokens=max_new_tokens,
        stop_tokens=frozenset({stop}),
    )
    while not state.is_complete:
        deltas = []
        for beam in state.running:
            top = sorted(enumerate(logprobs(beam.tokens)), key=lambda pair: -pair[1])
            deltas.append(OutputDelta(0, tokens=[0], top_logprobs=[top]))
        state.advance(deltas)

    scores: dict[tuple[int, ...], float] = {}
    for length in range(1, max_new_tokens + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            ends = tokens[-1] == stop or length == max_new_tokens
            if ends and stop not in tokens[:-1]:
                steps = (logprobs(tokens[:n])[token] for n, token in enumerate(tokens))
                scores[tokens] = math.fsum(steps) / length**length_penalty
    best = sorted(scores, key=lambda tokens: -scores[tokens])[:width]
    assert [hypothesis.beam.tokens for hypothesis in state.hypotheses] == best
    for hypothesis in state.hypotheses:
        assert hypothesis.score == pytest.approx(scores[hypothesis.beam.tokens], abs=1e-9)


def test_several_prompts_are_searched_together(server: Served) -> None:
    prompts = [PROMPT, PROMPT[:9]]
    fields = {"n": 3, "ignore_eos": True}
    choices = search(server, prompts, **fields)
    separate = [choice for prompt in prompts for choice in search(server, prompt, **fields)]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [c["token_ids"] for c in choices] == [c["token_ids"] for c in separate]


def test_steps_read_the_prefix_cache(server: Served) -> None:
    """Every step after the first computes less than a block for each beam."""
    before = server.engine.stats.computed
    prompt = PROMPT[::-1]
    search(server, prompt, n=4, ignore_eos=True)
    block_size = server.engine.config.block_size
    computed = server.engine.stats.computed - before
    assert computed <= len(prompt) + 4 * (MAX_TOKENS - 1) * block_size
    answer = server.ok("/v1/completions", prompt=prompt, n=4, use_beam_search=True, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert (
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        == len(prompt) // block_size * block_size
    )


def test_stop_token_in_the_text_and_special_tokens(byte_server: Served) -> None:
    fields = {"n": 2, "stop_token_ids": [ord("d")], "prompt": "a", "use_beam_search": True}
    texts = [
        byte_server.ok("/v1/completions", include_stop_str_in_output=included, **fields)["choices"]
        for included in (False, True)
    ]
    assert [choices[0]["text"] for choices in texts] == ["bc", "bcd"]
    assert [choices[0]["finish_reason"] for choices in texts] == ["stop", "stop"]


def test_chat_has_beams(byte_server: Served) -> None:
    fields = {"messages": [USER], "max_tokens": 3, "n": 2, "use_beam_search": True}
    choices = byte_server.ok("/v1/chat/completions", logprobs=True, **fields)["choices"]
    assert len(choices) == 2
    sums = [sum(e["logprob"] for e in choice["logprobs"]["content"]) for choice in choices]
    assert sums[0] > sums[1]
    greedy = byte_server.ok("/v1/chat/completions", messages=[USER], max_tokens=3, temperature=0)
    assert choices[0]["message"] == greedy["choices"][0]["message"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stream", {"stream": True}),
        ("temperature", {"temperature": 0.5}),
        ("top_p", {"top_p": 0.9}),
        ("top_k", {"top_k": 3}),
        ("min_p", {"min_p": 0.1}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("presence_penalty", {"presence_penalty": 0.1}),
        ("frequency_penalty", {"frequency_penalty": 0.1}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("stop", {"stop": "a"}),
        ("min_tokens", {"min_tokens": 2}),
        ("allowed_token_ids", {"allowed_token_ids": [5]}),
        ("bad_words", {"bad_words": ["a"]}),
        ("guided_regex", {"guided_regex": "a"}),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("echo", {"echo": True}),
        ("max_tokens", {"max_tokens": 0}),
        ("best_of", {"best_of": 1, "n": 2}),
        ("n", {"n": 16, "stop_token_ids": [1, 2, 3, 4]}),
        ("n", {"n": 16, "prompt": ["a"] * 5}),
        ("length_penalty", {"length_penalty": 2, "use_beam_search": False}),
        ("early_stopping", {"early_stopping": True, "use_beam_search": False}),
        ("length_penalty", {"length_penalty": 100}),
    ],
)
def test_fields_that_beam_search_cannot_serve(
    byte_server: Served, param: str, fields: dict[str, Any]
) -> None:
    body = {"prompt": "a", "use_beam_search": True, **fields}
    error = error_of(byte_server.post("/v1/completions", **body))
    assert error["param"] == param
    off = {"temperature": 1, "top_p": 1, "top_k": -1, "stop": [], "logit_bias": {}, "stream": False}
    byte_server.ok("/v1/completions", prompt="a", use_beam_search=True, **off)


def test_forced_tools_are_refused(chat_server: Served) -> None:
    fields = {"messages": [USER], "tools": [TOOL], "use_beam_search": True, "max_tokens": 5}
    error = error_of(chat_server.post("/v1/chat/completions", tool_choice="required", **fields))
    assert error["param"] == "tools"


def test_disconnect_aborts_the_search_and_releases_its_outputs() -> None:
    with served(max_outputs=4) as server:
        server.model.gate.clear()
        connection = server.send(
            "/v1/completions", prompt="a", n=4, use_beam_search=True, max_tokens=100
        )
        until(lambda: server.http.get("/load").json() == {"server_load": 4})
        # The outputs stay reserved, so that no other request can interrupt the search.
        for _ in range(2):
            error = error_of(server.post("/v1/completions", prompt="a", max_tokens=1), 429)
            assert error["code"] == "queue_full"
        connection.close()
        until(lambda: server.http.get("/load").json() == {"server_load": 0})
        server.model.gate.set()
        until(lambda: server.engine.unfinished == 0)
        server.ok("/v1/completions", prompt="a", n=4, max_tokens=1)


def test_paused_engine_aborts_the_search() -> None:
    with served(admin_key="admin-key") as server:
        server.model.gate.clear()
        with concurrent.futures.ThreadPoolExecutor(2) as executor:
            answer = executor.submit(
                server.post, "/v1/completions", prompt="a", n=2, use_beam_search=True, max_tokens=50
            )
            until(lambda: server.http.get("/load").json() == {"server_load": 2})
            paused = executor.submit(server.administer, "pause", mode="abort")
            server.model.gate.set()
            assert paused.result().status_code == 200
            choices = answer.result().json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        until(lambda: server.http.get("/load").json() == {"server_load": 0})
