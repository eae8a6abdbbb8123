# SPDX-License-Identifier: Apache-2.0
"""Structured output: every answer matches its grammar, and invalid grammars are refused."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron.cli.tokenizers import (
    ByteTokenizer,
    SentencePieceTokenizer,
    TiktokenOptions,
    TiktokenTokenizer,
    train_bpe,
)
from megatron.inference.server.guided_decoding import grammars as guided_grammars
from megatron.inference.server.guided_decoding.grammars import (
    BadGrammar,
    Grammars,
    ReasoningLimit,
    TokenMask,
)
from tests.support.http_server import END, Served
from tests.support.tiktoken_files import write_ranks, write_vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
#: Favours closing characters: random tokens of 256 hardly ever close a value.
CLOSING_BIAS = {str(ord(c)): 6 for c in '"}],'}


def text_of(server: Served, seed: int = 1, **fields: Any) -> str:
    """Return the text of an answer with finish reason "stop"."""
    request = {"prompt": "a", "max_tokens": 500, "seed": seed, "logit_bias": CLOSING_BIAS, **fields}
    (choice,) = server.ok("/v1/completions", **request)["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["text"]


def is_person(text: str) -> bool:
    """Check a text against `PERSON` without a validator."""
    person = json.loads(text)
    return (
        person.keys() == {"name", "age", "tags"}
        and isinstance(person["name"], str)
        and len(person["name"]) <= 8
        and type(person["age"]) is int
        and 0 <= person["age"] <= 150
        and len(person["tags"]) <= 3
        and all(tag in ("a", "é") for tag in person["tags"])
    )


@pytest.mark.parametrize("seed", range(4))
def test_json_answer_follows_its_schema(server: Served, seed: int) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}
    assert is_person(text_of(server, seed, response_format=shape))
    assert is_person(text_of(server, seed, structured_outputs={"json": PERSON}))
    assert isinstance(json.loads(text_of(server, response_format={"type": "json_object"})), dict)


def test_each_of_several_outputs_follows_the_schema(server: Served) -> None:
    fields = {"prompt": ["a", "b"], "n": 4, "max_tokens": 500, "logit_bias": CLOSING_BIAS}
    response = server.post("/v1/completions", **fields, structured_outputs={"json": PERSON})
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert len(set(texts)) > 1
    assert all(map(is_person, texts))


def test_regex_choice_and_lark_answers_match(server: Served) -> None:
    def answer_with(seed: int = 1, **kind: Any) -> str:
        return text_of(server, seed, structured_outputs=kind)

    assert re.fullmatch(r"[a-f]{3}-\d{2}", answer_with(regex=r"[a-f]{3}-[0-9]{2}"))
    choices = ["yes", 'no "really"', "é\n"]
    assert {answer_with(seed, choice=choices) for seed in range(12)} == set(choices)
    assert re.fullmatch(r"\d\+\d", answer_with(grammar='start: D "+" D\nD: /[0-9]/'))
    # Unknown keywords are annotations in JSON Schema.
    annotated = {"type": "string", "maxLength": 3, "x-note": 1, "minLenght": 2}
    assert isinstance(json.loads(answer_with(json=annotated)), str)
    server.ok("/v1/completions", prompt="a", response_format={"type": "text"})


def test_exploding_grammars_end_in_time() -> None:
    grammars = Grammars(ByteTokenizer(), [END], END + 1)
    bombs = [
        guided_grammars.regex_grammar("((a{1,9999}){1,9999}){1,9999}"),
        guided_grammars.regex_grammar("(a+)+$"),
        guided_grammars.lark_grammar(
            "start: " + " | ".join(f"/a{{{n},9999}}/" for n in range(1, 400))
        ),
    ]
    for bomb in bombs:
        with contextlib.suppress(BadGrammar):
            grammars.mask(bomb)([])


@pytest.mark.parametrize("n", [1, 3])
def test_forced_tokens_take_no_extra_steps(
    server: Served, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"regex": "the temperature is [0-9]{2} degrees, today"}

    def answer() -> tuple[list[Any], int]:
        before = server.engine.stats.steps
        request = {"prompt": "a", "seed": 4, "n": n, "logprobs": 1, "max_tokens": 99}
        choices = server.post("/v1/completions", **request, structured_outputs=shape).json()
        return choices["choices"], server.engine.stats.steps - before

    (choices, steps), forced = answer(), server.engine.stats.forced
    with monkeypatch.context() as patch:
        patch.setattr(TokenMask, "forced", lambda self, tokens: [])
        plain, unforced_steps = answer()
    assert server.engine.stats.forced == forced
    assert [c["text"] for c in choices] == [c["text"] for c in plain]
    assert choices[0]["logprobs"]["tokens"] == plain[0]["logprobs"]["tokens"]
    assert choices[0]["logprobs"]["token_logprobs"] == pytest.approx(
        plain[0]["logprobs"]["token_logprobs"], rel=1e-5
    )
    assert len({c["text"] for c in choices}) == n
    assert unforced_steps == 37
    assert steps <= 6  # both digits, the suffix, and the end


def test_grammar_is_compiled_outside_the_engine_loop(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, entered = threading.Event(), threading.Event()
    grammars = server.loop._grammars
    compile_now = grammars.compile

    def slow_compile(grammar: str) -> Any:
        if threading.current_thread() is not server.thread:
            entered.set()
            release.wait()
        return compile_now(grammar)

    monkeypatch.setattr(grammars, "compile", slow_compile)
    texts: list[str] = []
    request = {"structured_outputs": {"regex": "abc"}}
    waiting = threading.Thread(target=lambda: texts.append(text_of(server, **request)))
    waiting.start()
    entered.wait()
    assert server.post("/v1/completions", prompt="a").status_code == 200  # other requests continue
    assert texts == []
    release.set()
    waiting.join()
    assert texts == ["abc"]


def test_compiled_grammars_are_cached_by_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided_grammars, "MAX_CACHED_GRAMMARS", 2)
    grammars = Grammars(ByteTokenizer(), [END], END + 1)
    compiled = grammars.compile(guided_grammars.regex_grammar("a"))
    grammars.compile(guided_grammars.regex_grammar("b"))
    assert grammars.compile(guided_grammars.regex_grammar("a")) is compiled
    grammars.compile(guided_grammars.regex_grammar("c"))  # evicts b
    assert grammars.compile(guided_grammars.regex_grammar("a")) is compiled


def test_mask_is_a_function_of_the_tokens() -> None:
    """Speculation and preemption request masks in any order, after rejected drafts too."""
    grammars = Grammars(ByteTokenizer(), [END], END + 3)
    grammar = guided_grammars.json_grammar(PERSON)
    text = list(b'{"name": "x", "age": 7, "tags": ["a"]}')
    mask = grammars.mask(grammar)
    source = random.Random(0)
    for length in source.choices(range(len(text) + 1), k=60):
        fresh: TokenMask = grammars.mask(grammar)
        token_mask = mask(text[:length])
        assert token_mask.shape == (END + 3,)
        assert token_mask.equal(fresh(text[:length]))
        assert token_mask[text[length]] if length < len(text) else token_mask[END]
    assert not mask(list(b"no JSON")).any()


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece", "ranks", "vocabulary"])
def test_every_tokenizer_follows_the_grammar(kind: str, tmp_path: Path) -> None:
    """Tokens drawn from the masks decode to a text of the grammar."""
    tokenizer: Any
    if kind == "bpe":
        words = ['{"name": "é日 the and", "age": 12}'] * 20
        tokenizer = train_bpe(words, 300, tmp_path / "t.json")
    elif kind == "sentencepiece":
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the name of the age", '{"name": "a thing", "age": 1}'] * 20),
            model_prefix=str(tmp_path / "t"),
            vocab_size=310,
            byte_fallback=True,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            minloglevel=2,
        )
        tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    elif kind == "ranks":
        options = TiktokenOptions(special_tokens=("<|end_of_text|>",))
        tokenizer = TiktokenTokenizer(write_ranks(tmp_path / "t.tiktoken"), options)
    else:
        options = TiktokenOptions(num_special_tokens=20)
        tokenizer = TiktokenTokenizer(write_vocabulary(tmp_path / "t.json"), options)
    end, size = tokenizer.eod, tokenizer.vocab_size
    grammars = Grammars(tokenizer, [end], size + 3)
    grammar = guided_grammars.regex_grammar(r'\{"name": "é日 (the|and)? 123"\}')
    source, texts = random.Random(3), set()
    for _ in range(8):
        mask, tokens = grammars.mask(grammar), []
        while not tokens or tokens[-1] != end:
            tokens.append(source.choice(mask(tokens).nonzero().flatten().tolist()))
        texts.add(tokenizer.detokenize(tokens))
    assert 1 < len(texts) <= 3
    assert all(re.fullmatch(r'\{"name": "é日 (the|and)? 123"\}', text) for text in texts)
    forced = grammars.mask(grammar).forced([])
    assert tokenizer.detokenize(forced).startswith('{"name": "é')
    if kind != "bpe":
        assert len(tokenizer.token_bytes()) == size
        assert tokenizer.token_bytes()[end] is None


def test_reasoning_limit_does_not_shorten_the_answer() -> None:
    decoded: list[int] = []

    def decode(tokens: list[int]) -> bytes:
        decoded.append(len(tokens))
        return bytes(tokens)

    end = list(b"</t>")
    limit = ReasoningLimit(None, decode, 256, begin="", end="</t>", end_tokens=end, after=20)
    tokens = list(b"x" * 20)
    for token in end:
        assert limit.forced(tokens)[0] == token
        tokens.append(token)
    reasoned = len(decoded)
    for _ in range(200):
        assert limit(tokens) is None
        assert limit.forced(tokens) == []
        tokens.append(ord("y"))
    assert len(decoded) <= reasoned + 4, "the reasoning is decoded again for each token"
    # Tokens after a rollback are decoded again.
    assert limit.forced(list(b"x" * 30)) == end
