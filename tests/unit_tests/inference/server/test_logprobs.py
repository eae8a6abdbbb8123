# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities name each token, say its bytes, and where it begins in the text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
import sentencepiece

from megatron.cli.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TiktokenOptions,
    TiktokenTokenizer,
    Tokenizer,
    train_bpe,
)
from megatron.core.inference.text_stream import TextStream
from megatron.inference.server.generation import Delta, TokenScore
from megatron.inference.server.views import CompletionView, token_bytes
from tests.support.http_server import Served, served
from tests.support.llama_tokenizer import write_llama_tokenizer
from tests.support.scripted_model import Scripted
from tests.support.tiktoken_files import write_ranks

TEXT = "the fox, 日本 🦙🦙 and thé <end> of\n the"
KINDS = ("byte", "bpe", "llama", "sentencepiece", "tiktoken")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return a tokenizer of every kind in which the characters of TEXT have several tokens."""
    folder = tmp_path_factory.mktemp("tokenizers")
    words = ["the fox and the end of the day", "then the other and the one"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words),
        model_prefix=str(folder / "t"),
        vocab_size=310,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    write_llama_tokenizer(folder / "llama")
    return {
        "byte": ByteTokenizer(),
        "bpe": train_bpe([*words, "日本"], 300, folder / "bpe.json"),
        "llama": HuggingFaceTokenizer(folder / "llama"),
        "sentencepiece": SentencePieceTokenizer(folder / "t.model"),
        "tiktoken": TiktokenTokenizer(
            write_ranks(folder / "t.tiktoken"), TiktokenOptions(special_tokens=("</s>",))
        ),
    }


def choice(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    step: int,
    echo: bool = False,
) -> dict[str, Any]:
    """Return a choice whose tokens came in steps of so many, as `Generation` makes deltas."""
    view = CompletionView("m", tokenizer, prompts=[prompt], n=1, logprobs=True, echo=echo)
    stream = TextStream(tokenizer.detokenize, prompt)
    deltas = []
    for start in range(0, len(tokens), step):
        new, last = tokens[start : start + step], start + step >= len(tokens)
        scores = [TokenScore(id=token, logprob=-1.0, top=[(token, -1.0)]) for token in new]
        prompt_scores = [TokenScore(id=token, logprob=None) for token in prompt]
        deltas.append(
            Delta(
                index=0,
                text=stream.push(new, finished=last),
                scores=scores,
                prompt_scores=prompt_scores if echo and not start else None,
            )
        )
    return view.choice(deltas)


def character_of_bytes(text: bytes, *, each: bool = False) -> tuple[list[int], int]:
    """Return at which character of the decoded text each byte's character begins, and how many
    characters it has.

    Args:
        text: in UTF-8.
        each: bytes that are no character are replaced one by one.
    """
    places: list[int] = []
    characters = 0
    while len(places) < len(text):
        left, wrong = text[len(places) :], 0
        try:
            whole = left.decode()
        except UnicodeDecodeError as error:
            whole, wrong = left[: error.start].decode(), error.end - error.start
        for char in whole:
            places += [characters] * len(char.encode())
            characters += 1
        places += [characters] * wrong
        characters += wrong if each else min(wrong, 1)
    return places, characters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("echo", [False, True])
def test_text_offset_indexes_the_text(
    tokenizers: dict[str, Tokenizer], kind: str, echo: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.tokenize(TEXT, add_special_tokens=False)
    cut = len(tokenizer.tokenize("the fox,", add_special_tokens=False))
    prompt, tokens = ids[:cut], ids[cut:]
    found = choice(tokenizer, prompt, tokens, step=1, echo=echo)
    assert found == choice(tokenizer, prompt, tokens, step=3, echo=echo)
    text, scores = found["text"], found["logprobs"]
    whole = tokenizer.detokenize(ids)
    assert text == (whole if echo else whole[len("the fox,") :])
    places = list(zip(scores["tokens"], scores["text_offset"], strict=True))
    assert len(places) == len(ids if echo else tokens)
    shown = ""
    parts = 0
    for offset, group in itertools.groupby(places, key=lambda place: place[1]):
        names = [name for name, _ in group]
        assert offset == len(shown)
        if names[0].startswith("bytes:"):
            in_bytes = bytes.fromhex("".join(names).replace("bytes:", "").replace("\\x", ""))
            assert len(in_bytes.decode()) == 1
            parts += len(names)
            shown += in_bytes.decode()
        else:
            (name,) = names
            shown += name
    assert shown == text
    assert parts > 4


@pytest.mark.parametrize("kind", ["byte", "bpe", "tiktoken", "sentencepiece"])
@pytest.mark.parametrize("seed", range(3))
def test_text_offset_counts_bytes_that_are_no_text(
    tokenizers: dict[str, Tokenizer], kind: str, seed: int
) -> None:
    """A model that writes random tokens writes halves of characters."""
    tokenizer, source = tokenizers[kind], random.Random(seed)
    each = kind == "sentencepiece"
    by_bytes = {tokenizer.bytes_of(number): number for number in range(tokenizer.vocab_size)}
    parts = [bytes([byte]) for byte in (0x80, 0xBF, 0xC3, 0xE6, 0x97, 0xA5, 0xF0, 0xFF)]
    often = [by_bytes[part] for part in (b"a", *parts)]
    others = [number for part, number in by_bytes.items() if part]
    draw = [source.choice(others if source.random() < 0.3 else often) for _ in range(220)]
    prompt, tokens = [by_bytes[b"a"], *draw[:20], by_bytes[b"a"]], draw[20:]
    found = choice(tokenizer, prompt, tokens, step=4, echo=True)
    start, offsets = 0, []
    for ids in (prompt, tokens):
        written = [tokenizer.bytes_of(token) or b"" for token in ids]
        places, characters = character_of_bytes(b"".join(written), each=each)
        begins = itertools.accumulate(map(len, written[:-1]), initial=0)
        offsets += [start + places[begin] for begin in begins]
        start += characters
    assert len(found["text"]) == start
    assert found["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_whole_tokens_stand_at_their_offsets(
    tokenizers: dict[str, Tokenizer], kind: str, seed: int
) -> None:
    """Also after a prompt that ends within a character, and after special tokens."""
    tokenizer, source = tokenizers[kind], random.Random(seed)
    vocabulary = range(tokenizer.vocab_size + 2)
    often = tokenizer.tokenize("the a", add_special_tokens=False)
    ids = [source.choice(often if source.random() < 0.5 else vocabulary) for _ in range(300)]
    # Of a run of bytes this decoder replaces all if one is wrong, in a prompt also earlier ones.
    by_runs = kind == "llama"
    for cut in (1, 20, 150):
        found = choice(tokenizer, ids[:cut], ids[cut:], step=4, echo=not by_runs)
        text, scores, whole = found["text"], found["logprobs"], 0
        shown = ids[cut:] if by_runs else ids
        for token, name, offset in zip(shown, scores["tokens"], scores["text_offset"], strict=True):
            if by_runs and (tokenizer.name_of(token) or "").startswith("<0x"):
                continue
            if (tokenizer.bytes_of(token) or b"\xff").isascii():
                assert text[offset : offset + len(name)] == name
                whole += 1
        assert whole > 60


@pytest.mark.parametrize("kind", ["llama", "sentencepiece"])
def test_text_offset_counts_each_byte_that_is_replaced(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    """SentencePiece replaces each byte of a character that is not whole."""
    tokenizer = tokenizers[kind]
    by_bytes = {tokenizer.bytes_of(number): number for number in range(tokenizer.vocab_size)}
    written = (b" the", b"\xe6", b"\x97", b"a", b"\xe6", b"\x97", b"\xa5", b"\xff", b" the")
    tokens = [by_bytes[part] for part in written]
    found = choice(tokenizer, [by_bytes[b"a"]], tokens, step=1)
    assert found["text"] == " the\ufffd\ufffda日\ufffd the"
    assert found["logprobs"]["text_offset"] == [0, 4, 4, 6, 7, 7, 7, 8, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_add_up_to_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.tokenize(TEXT, add_special_tokens=False)
    joined = bytes(byte for token in ids for byte in token_bytes(tokenizer, token) or ())
    assert joined.decode().removeprefix(" ") == TEXT
    for token in range(tokenizer.vocab_size + 2):
        if (in_bytes := token_bytes(tokenizer, token)) is None:
            raise AssertionError(tokenizer.name_of(token))
        # In a text between whole characters a token writes these bytes.
        whole = tokenizer.detokenize([*ids, token, *ids])
        around = tokenizer.detokenize([*ids, *ids])[len(TEXT) :]
        if tokenizer.bytes_of(token) is not None and "\ufffd" not in whole:
            assert whole == TEXT + bytes(in_bytes).decode() + around


def test_tokens_without_a_text_have_names(tokenizers: dict[str, Tokenizer]) -> None:
    ends = {kind: tokenizer.eod for kind, tokenizer in tokenizers.items()}
    names = {
        kind: choice(tokenizers[kind], [97], [end], step=1)["logprobs"]["tokens"][0]
        for kind, end in ends.items()
        if end is not None
    }
    assert names == {
        "byte": "token_id:256",
        "bpe": "<|endoftext|>",
        "llama": "</s>",
        "sentencepiece": "</s>",
        "tiktoken": "</s>",
    }
    padded = tokenizers["llama"].vocab_size + 5
    found = choice(tokenizers["llama"], [97], [padded, padded], step=1)
    assert found["logprobs"]["tokens"] == [f"token_id:{padded}"] * 2
    assert found["logprobs"]["text_offset"] == [0, 0]
    assert token_bytes(NullTokenizer(9), 5) == [ord("5")]


def test_alternatives_of_one_text_are_apart(tokenizers: dict[str, Tokenizer]) -> None:
    """In SentencePiece a letter and its byte are two tokens."""
    tokenizer = tokenizers["llama"]
    letter, byte = (tokenizer._tokenizer.token_to_id(name) for name in ("a", "<0x61>"))
    view = CompletionView("m", tokenizer, prompts=[[letter]], n=1, logprobs=True, echo=False)
    top = [(letter, -1.0), (byte, -2.0), (tokenizer.vocab_size, -3.0)]
    scores = [TokenScore(id=number, logprob=value, top=top) for number, value in top]
    found = view.choice([Delta(index=0, text="aa", scores=scores)])["logprobs"]
    assert found["tokens"] == ["a", "a", f"token_id:{tokenizer.vocab_size}"]
    first, second, _ = found["top_logprobs"]
    assert first == {"a": -1.0, f"token_id:{byte}": -2.0, f"token_id:{tokenizer.vocab_size}": -3.0}
    assert second["a"] == -2.0
    assert second[f"token_id:{letter}"] == -1.0


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Scripted()) as running:
        yield running


def test_number_of_top_logprobs_matches_request(server: Served) -> None:
    """Most of 257 bytes are no text of their own."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        server.model.say("é日🦙!")
        asked: dict[str, Any] = {"model": "next-byte", "max_tokens": 40, "temperature": 0}
        found = client.completions.create(**asked, prompt="aé", logprobs=20, echo=True).choices[0]
        scores = found.logprobs
        assert found.text == "aéé日🦙!"
        assert scores.tokens[1:5] == [r"bytes:\xc3", r"bytes:\xa9"] * 2
        assert scores.text_offset == [0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 6]
        assert [len(top) for top in scores.top_logprobs[1:]] == [20] * 13
        for name, top in zip(scores.tokens[3:], scores.top_logprobs[3:], strict=True):
            assert max(top, key=top.get) == name
        server.model.say("é日🦙!")
        user = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(
            **asked, messages=user, logprobs=True, top_logprobs=20
        ).choices[0]
        tokens = answer.logprobs.content
        assert bytes(byte for one in tokens for byte in one.bytes).decode() == "é日🦙!"
        assert tokens[0].token == r"\xc3"
        assert all(top.bytes is not None for one in tokens for top in one.top_logprobs)
        assert {len(one.top_logprobs) for one in tokens} == {20}
