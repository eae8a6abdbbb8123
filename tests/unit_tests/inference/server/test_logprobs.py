# SPDX-License-Identifier: Apache-2.0
"""Logprobs contain each token's name, bytes and offset in the text."""

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
from megatron.core.inference import TextStream
from megatron.inference.server.output_processor import Delta, TokenScore, Usage
from megatron.inference.server.protocol.completions import CompletionBody, CompletionFormatter
from megatron.inference.server.protocol.token_text import token_bytes
from tests.support.http_server import Served, served
from tests.support.llama_tokenizer import write_llama_tokenizer
from tests.support.scripted_model import Scripted
from tests.support.tiktoken_files import write_ranks

TEXT = "the fox, 日本 🦙🦙 and thé <end> of\n the"
KINDS = ("byte", "bpe", "llama", "sentencepiece", "tiktoken")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return tokenizers of every kind that split characters of TEXT into several tokens."""
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


def completion_formatter(
    tokenizer: Tokenizer, prompt: Sequence[int], *, echo: bool = False
) -> CompletionFormatter:
    body = CompletionBody(prompt="", logprobs=3, echo=echo)
    return CompletionFormatter(
        body, Usage(), prompts=[prompt], model="m", tokenizer=tokenizer, request_id=""
    )


def choice(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    step: int,
    echo: bool = False,
) -> dict[str, Any]:
    """Return a choice built from deltas of `step` tokens, as `Generation` creates them."""
    formatter = completion_formatter(tokenizer, prompt, echo=echo)
    stream = TextStream(tokenizer.detokenize, prompt)
    deltas = []
    for start in range(0, len(tokens), step):
        new, is_last = tokens[start : start + step], start + step >= len(tokens)
        scores = [TokenScore(id=token, logprob=-1.0, top=[(token, -1.0)]) for token in new]
        prompt_scores = [TokenScore(id=token, logprob=None) for token in prompt]
        deltas.append(
            Delta(
                index=0,
                text=stream.push(new, finished=is_last),
                scores=scores,
                prompt_scores=prompt_scores if echo and not start else None,
            )
        )
    return formatter.choice(deltas)


def character_of_bytes(text: bytes, *, per_byte: bool = False) -> tuple[list[int], int]:
    """Return each byte's character index in the decoded text, and the number of characters.

    Args:
        text: UTF-8 bytes, possibly invalid.
        per_byte: replace each invalid byte instead of each invalid run.
    """
    indices: list[int] = []
    characters = 0
    while len(indices) < len(text):
        remaining, num_invalid = text[len(indices) :], 0
        try:
            valid = remaining.decode()
        except UnicodeDecodeError as error:
            valid, num_invalid = remaining[: error.start].decode(), error.end - error.start
        for char in valid:
            indices += [characters] * len(char.encode())
            characters += 1
        indices += [characters] * num_invalid
        characters += num_invalid if per_byte else min(num_invalid, 1)
    return indices, characters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("echo", [False, True])
def test_text_offset_indexes_the_text(
    tokenizers: dict[str, Tokenizer], kind: str, echo: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.tokenize(TEXT, add_special_tokens=False)
    cut = len(tokenizer.tokenize("the fox,", add_special_tokens=False))
    prompt, tokens = ids[:cut], ids[cut:]
    completion = choice(tokenizer, prompt, tokens, step=1, echo=echo)
    assert completion == choice(tokenizer, prompt, tokens, step=3, echo=echo)
    text, scores = completion["text"], completion["logprobs"]
    full_text = tokenizer.detokenize(ids)
    assert text == (full_text if echo else full_text[len("the fox,") :])
    names_and_offsets = list(zip(scores["tokens"], scores["text_offset"], strict=True))
    assert len(names_and_offsets) == len(ids if echo else tokens)
    prefix = ""
    num_byte_tokens = 0
    for offset, group in itertools.groupby(names_and_offsets, key=lambda pair: pair[1]):
        names = [name for name, _ in group]
        assert offset == len(prefix)
        if names[0].startswith("bytes:"):
            in_bytes = bytes.fromhex("".join(names).replace("bytes:", "").replace("\\x", ""))
            assert len(in_bytes.decode()) == 1
            num_byte_tokens += len(names)
            prefix += in_bytes.decode()
        else:
            (name,) = names
            prefix += name
    assert prefix == text
    assert num_byte_tokens > 4


@pytest.mark.parametrize("kind", ["byte", "bpe", "tiktoken", "sentencepiece"])
@pytest.mark.parametrize("seed", range(3))
def test_text_offset_counts_invalid_bytes(
    tokenizers: dict[str, Tokenizer], kind: str, seed: int
) -> None:
    """A model that generates random tokens generates incomplete characters."""
    tokenizer, source = tokenizers[kind], random.Random(seed)
    per_byte = kind == "sentencepiece"
    by_bytes = {tokenizer.bytes_of(number): number for number in range(tokenizer.vocab_size)}
    invalid_bytes = [bytes([byte]) for byte in (0x80, 0xBF, 0xC3, 0xE6, 0x97, 0xA5, 0xF0, 0xFF)]
    frequent = [by_bytes[content] for content in (b"a", *invalid_bytes)]
    rare = [number for content, number in by_bytes.items() if content]
    draw = [source.choice(rare if source.random() < 0.3 else frequent) for _ in range(220)]
    prompt, tokens = [by_bytes[b"a"], *draw[:20], by_bytes[b"a"]], draw[20:]
    completion = choice(tokenizer, prompt, tokens, step=4, echo=True)
    start, offsets = 0, []
    for ids in (prompt, tokens):
        written = [tokenizer.bytes_of(token) or b"" for token in ids]
        indices, characters = character_of_bytes(b"".join(written), per_byte=per_byte)
        begins = itertools.accumulate(map(len, written[:-1]), initial=0)
        offsets += [start + indices[begin] for begin in begins]
        start += characters
    assert len(completion["text"]) == start
    assert completion["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_complete_tokens_are_at_their_offsets(
    tokenizers: dict[str, Tokenizer], kind: str, seed: int
) -> None:
    """Offsets also hold after a prompt that ends within a character and after special tokens."""
    tokenizer, source = tokenizers[kind], random.Random(seed)
    vocabulary = range(tokenizer.vocab_size + 2)
    frequent = tokenizer.tokenize("the a", add_special_tokens=False)
    ids = [source.choice(frequent if source.random() < 0.5 else vocabulary) for _ in range(300)]
    # This decoder replaces a whole run of bytes if one byte is invalid, even bytes of the prompt.
    by_runs = kind == "llama"
    for cut in (1, 20, 150):
        completion = choice(tokenizer, ids[:cut], ids[cut:], step=4, echo=not by_runs)
        text, scores, num_complete = completion["text"], completion["logprobs"], 0
        echoed = ids[cut:] if by_runs else ids
        for token, name, offset in zip(
            echoed, scores["tokens"], scores["text_offset"], strict=True
        ):
            if by_runs and (tokenizer.name_of(token) or "").startswith("<0x"):
                continue
            if (tokenizer.bytes_of(token) or b"\xff").isascii():
                assert text[offset : offset + len(name)] == name
                num_complete += 1
        assert num_complete > 60


@pytest.mark.parametrize("kind", ["llama", "sentencepiece"])
def test_text_offset_counts_each_replaced_byte(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """SentencePiece replaces each byte of an incomplete character."""
    tokenizer = tokenizers[kind]
    by_bytes = {tokenizer.bytes_of(number): number for number in range(tokenizer.vocab_size)}
    written = (b" the", b"\xe6", b"\x97", b"a", b"\xe6", b"\x97", b"\xa5", b"\xff", b" the")
    tokens = [by_bytes[token] for token in written]
    completion = choice(tokenizer, [by_bytes[b"a"]], tokens, step=1)
    assert completion["text"] == " the\ufffd\ufffda日\ufffd the"
    assert completion["logprobs"]["text_offset"] == [0, 4, 4, 6, 7, 7, 7, 8, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_join_to_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.tokenize(TEXT, add_special_tokens=False)
    joined = bytes(byte for token in ids for byte in token_bytes(tokenizer, token) or ())
    assert joined.decode().removeprefix(" ") == TEXT
    for token in range(tokenizer.vocab_size + 2):
        if (in_bytes := token_bytes(tokenizer, token)) is None:
            raise AssertionError(tokenizer.name_of(token))
        # Between complete characters, a token decodes to exactly these bytes.
        with_token = tokenizer.detokenize([*ids, token, *ids])
        suffix = tokenizer.detokenize([*ids, *ids])[len(TEXT) :]
        if tokenizer.bytes_of(token) is not None and "\ufffd" not in with_token:
            assert with_token == TEXT + bytes(in_bytes).decode() + suffix


def test_tokens_without_text_have_names(tokenizers: dict[str, Tokenizer]) -> None:
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
    completion = choice(tokenizers["llama"], [97], [padded, padded], step=1)
    assert completion["logprobs"]["tokens"] == [f"token_id:{padded}"] * 2
    assert completion["logprobs"]["text_offset"] == [0, 0]
    assert token_bytes(NullTokenizer(9), 5) == [ord("5")]


def test_alternatives_with_equal_text_are_distinguished(tokenizers: dict[str, Tokenizer]) -> None:
    """In SentencePiece, a letter and its byte are different tokens."""
    tokenizer = tokenizers["llama"]
    letter, byte = (tokenizer._tokenizer.token_to_id(name) for name in ("a", "<0x61>"))
    formatter = completion_formatter(tokenizer, [letter])
    top = [(letter, -1.0), (byte, -2.0), (tokenizer.vocab_size, -3.0)]
    scores = [TokenScore(id=number, logprob=value, top=top) for number, value in top]
    logprobs = formatter.choice([Delta(index=0, text="aa", scores=scores)])["logprobs"]
    assert logprobs["tokens"] == ["a", "a", f"token_id:{tokenizer.vocab_size}"]
    letter_top, byte_top, _ = logprobs["top_logprobs"]
    assert letter_top == {
        "a": -1.0,
        f"token_id:{byte}": -2.0,
        f"token_id:{tokenizer.vocab_size}": -3.0,
    }
    assert byte_top["a"] == -2.0
    assert byte_top[f"token_id:{letter}"] == -1.0


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Scripted()) as running:
        yield running


def test_number_of_top_logprobs_matches_request(server: Served, client: openai.OpenAI) -> None:
    """Most of the 257 byte tokens have no text."""
    server.model.say("é日🦙!")
    fields: dict[str, Any] = {"model": "next-byte", "max_tokens": 40, "temperature": 0}
    completion = client.completions.create(**fields, prompt="aé", logprobs=20, echo=True).choices[0]
    scores = completion.logprobs
    assert completion.text == "aéé日🦙!"
    assert scores.tokens[1:5] == [r"bytes:\xc3", r"bytes:\xa9"] * 2
    assert scores.text_offset == [0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 6]
    assert [len(top) for top in scores.top_logprobs[1:]] == [20] * 13
    for name, top in zip(scores.tokens[3:], scores.top_logprobs[3:], strict=True):
        assert max(top, key=top.get) == name
    server.model.say("é日🦙!")
    user = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(
        **fields, messages=user, logprobs=True, top_logprobs=20
    ).choices[0]
    tokens = answer.logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == "é日🦙!"
    assert tokens[0].token == r"\xc3"
    assert all(top.bytes is not None for token in tokens for top in token.top_logprobs)
    assert {len(token.top_logprobs) for token in tokens} == {20}
