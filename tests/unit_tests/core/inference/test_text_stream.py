# SPDX-License-Identifier: Apache-2.0
"""Streamed text: deltas add up to the whole text at bounded cost, up to a stop string."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.cli.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    train_bpe,
)
from megatron.core.inference import TextStream
from megatron.core.inference.text_stream import REPLACEMENT
from tests.support.continuation import continuation

TEXTS = ["the theory of the thing", "a def is a def of a thing", "naïve 漢字 café"] * 20
# ASCII with blanks, combining marks, CJK, emoji with joiners and flags, the replacement character.
ALPHABET = [
    *"the of ad  \n", "é", "e\u0301", "漢", "字", "한", "😀", "👩\u200d🚀", "🇩🇪", REPLACEMENT,
]  # fmt: skip
# More tokens than any decoder needs at once.
FEW = 64


def make_sentencepiece(folder: Path, name: str, **options: object) -> Tokenizer:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / name), vocab_size=320,
        hard_vocab_limit=False, byte_fallback=True, minloglevel=2, **options,
    )  # fmt: skip
    return SentencePieceTokenizer(folder / f"{name}.model")


def make_byte_fallback(folder: Path) -> Tokenizer:
    """Return a `tokenizer.json` like Llama 2's: blanks as U+2581, unknown characters as bytes."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁theofad", "▁t"]
    model = tokenizers.models.BPE(
        {letter: n for n, letter in enumerate(letters)}, [("▁", "t")],
        unk_token="<unk>", byte_fallback=True, fuse_unk=True,
    )  # fmt: skip
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.save(str(folder / "fallback.json"))
    return HuggingFaceTokenizer(folder / "fallback.json")


KINDS = ("byte", "byte_bpe", "sentencepiece", "plain_sentencepiece", "byte_fallback")


@pytest.fixture(scope="module")
def tokenizer_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte": ByteTokenizer(),
        "byte_bpe": train_bpe(TEXTS, 300, folder / "bpe.json"),
        "sentencepiece": make_sentencepiece(folder, "normal"),
        "plain_sentencepiece": make_sentencepiece(
            folder, "plain", normalization_rule_name="identity", remove_extra_whitespaces=False
        ),
        "byte_fallback": make_byte_fallback(folder),
    }


def chunks(tokens: Sequence[int], source: random.Random) -> list[list[int]]:
    """Split tokens into calls, some of them empty."""
    calls, start = [], 0
    while start < len(tokens):
        size = source.choice([0, 1, 1, 1, 2, 3, 9])
        calls.append(list(tokens[start : start + size]))
        start += size
    return calls


def stream_all(stream: TextStream, calls: Sequence[Sequence[int]]) -> list[str]:
    """Push all calls, then finish."""
    return [*(stream.push(call) for call in calls), stream.push([], finished=True)]


def random_text(source: random.Random, count: int) -> str:
    return "".join(source.choices(ALPHABET, k=count))


class CountingDecoder:
    """A decode function that records the number of tokens per call."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.counts: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> str:
        self.counts.append(len(tokens))
        return self.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_add_up_to_the_whole_text(
    kind: str, tokenizer_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer, source = tokenizer_by_kind[kind], random.Random(kind)
    for _ in range(60):
        prompt = tokenizer.tokenize(random_text(source, source.choice([0, 1, 30])))
        tokens = tokenizer.tokenize(random_text(source, source.choice([1, 8, 90])))
        deltas = stream_all(TextStream(tokenizer.detokenize, prompt), chunks(tokens, source))
        assert "".join(deltas) == continuation(tokenizer, prompt)(tokens)


@pytest.mark.parametrize("kind", ["byte", "byte_bpe", "sentencepiece", "plain_sentencepiece"])
def test_deltas_of_random_tokens_add_up(kind: str, tokenizer_by_kind: dict[str, Tokenizer]) -> None:
    """Invalid UTF-8, special tokens, ids beyond the vocabulary and blanks in any order."""
    tokenizer, source = tokenizer_by_kind[kind], random.Random(kind)
    common = {*tokenizer.tokenize("  the 漢😀\ufffd "), *([tokenizer.eod] * (tokenizer.eod or 0))}
    rare = sorted(source.sample(range(tokenizer.vocab_size), 5))
    for _ in range(150):
        prompt = tokenizer.tokenize(source.choice(["", "the", "of\n", "漢"]))
        tokens = source.choices([*sorted(common), *rare], k=source.choice([3, 12, 70]))
        deltas = stream_all(TextStream(tokenizer.detokenize, prompt), chunks(tokens, source))
        assert "".join(deltas) == continuation(tokenizer, prompt)(tokens)


def test_deltas_of_numeric_tokens_add_up() -> None:
    tokenizer = NullTokenizer(50)
    tokens = [*range(30), 50, 50, *range(9)]
    for prompt in ([], [4, 7]):
        deltas = stream_all(TextStream(tokenizer.detokenize, prompt), [[t] for t in tokens])
        assert "".join(deltas) == continuation(tokenizer, prompt)(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_contain_only_whole_characters(
    kind: str, tokenizer_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer, text = tokenizer_by_kind[kind], "the 漢字 😀😀 naïve 👩\u200d🚀👩\u200d🚀 thing"
    tokens = tokenizer.tokenize(text)
    deltas = stream_all(TextStream(tokenizer.detokenize), [[token] for token in tokens])
    assert "".join(deltas) == tokenizer.detokenize(tokens)
    assert not any(REPLACEMENT in delta for delta in deltas)
    # Characters are emitted once complete: only tokens inside a character have empty deltas.
    assert sum(map(bool, deltas)) >= len(tokens) - 3 * sum(c > "\x7f" for c in text)


def test_ascii_is_streamed_immediately() -> None:
    stream = TextStream(ByteTokenizer().detokenize)
    assert [stream.push([byte]) for byte in b"abc"] == ["a", "b", "c"]


def test_unfinished_character_is_emitted_at_the_end() -> None:
    stream = TextStream(ByteTokenizer().detokenize)
    assert stream.push("x€".encode()[:-1]) == "x"
    assert stream.push([], finished=True) == REPLACEMENT
    assert stream.push(b"x", finished=True) == ""


def test_replaced_byte_run_does_not_change_emitted_text(
    tokenizer_by_kind: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizer_by_kind["byte_fallback"]
    tokens = tokenizer.tokenize("😀😀")[1:]  # without the blank
    stream = TextStream(tokenizer.detokenize, tokenizer.tokenize("the"))
    assert "".join(stream.push([token]) for token in tokens[:-1]) == "😀"
    assert tokenizer.detokenize(tokens[:-1]) == 7 * REPLACEMENT
    assert stream.push(tokenizer.tokenize("the")) == 3 * REPLACEMENT + " the"
    endless = TextStream(tokenizer.detokenize)
    text = "".join(endless.push([token]) for token in [*tokens, *tokens[:1] * 100])
    assert text == "😀😀" + 97 * REPLACEMENT
    assert endless.push(tokens, finished=True) == 11 * REPLACEMENT


@pytest.mark.parametrize("kind", KINDS)
def test_context_may_begin_inside_a_character(
    kind: str, tokenizer_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizer_by_kind[kind]
    tokens = tokenizer.tokenize("한" * 20)[-24:]  # a cycle of the same three bytes
    # If whole runs of bytes are replaced, a run that begins inside a character stays broken.
    ends = (9, 18, 21) if kind == "byte_fallback" else (8, 9, 10, 20, 21, 22, 23)
    for prompt in ends:
        context = tokens[prompt % 3 : prompt]
        deltas = stream_all(
            TextStream(tokenizer.detokenize, context), [[t] for t in tokens[prompt:]]
        )
        text = "".join(deltas)
        assert text.strip(REPLACEMENT) == "한" * len(text.strip(REPLACEMENT))
        assert len(text.strip(REPLACEMENT)) == (24 - prompt) // 3


HARD_INPUTS = {
    "text": lambda t: t.tokenize(random_text(random.Random(1), 3000)),
    "cjk": lambda t: t.tokenize("漢字한" * 400),
    "joined": lambda t: t.tokenize("👩\u200d🚀" * 200),
    "blanks": lambda t: t.tokenize(" 漢")[:1] * 2000,
    "replaced": lambda t: t.tokenize(REPLACEMENT * 700),
    "special": lambda t: [*t.tokenize("a 漢")[:-1], *[t.eod] * 2000, *t.tokenize("漢 b")],
    "broken": lambda t: t.tokenize("漢")[-3:-2] * 2000,
    "all": lambda t: random.Random(2).choices(range(t.vocab_size), k=2000),
}


@pytest.mark.parametrize("case", HARD_INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_push_decodes_few_tokens(
    kind: str, case: str, tokenizer_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizer_by_kind[kind]
    decode = CountingDecoder(tokenizer.detokenize)
    tokens = [*HARD_INPUTS[case](tokenizer), *tokenizer.tokenize(" the thing")]
    tokens = [token for token in tokens if token is not None]
    prompt = tokenizer.tokenize("the thing " * 50)
    stream = TextStream(decode, prompt, stop=["never"])
    text = ""
    for token in tokens:
        decode.counts.clear()
        text += stream.push([token])
        assert 0 < sum(decode.counts) <= 4 * FEW
        assert max(decode.counts) <= FEW
    decode.counts.clear()
    text += stream.push([], finished=True)
    assert sum(decode.counts) <= 2 * FEW
    if kind != "byte_fallback" or case not in ("replaced", "special", "broken", "all"):
        assert text == continuation(tokenizer, prompt)(tokens)


def test_ordinary_token_is_decoded_with_few_others() -> None:
    decode = CountingDecoder(ByteTokenizer().detokenize)
    stream = TextStream(decode)
    for _ in range(1000):
        stream.push(b"a")
    assert sum(decode.counts) < 8 * 1000


def test_characters_that_never_end_with_a_token_add_up() -> None:
    text = "€漢字한" * 60
    encoded = b"x" + text.encode()
    pairs = [encoded[n : n + 3] for n in range(0, len(encoded), 3)]  # each ends inside a character

    def decode(tokens: Sequence[int]) -> str:
        assert len(tokens) <= FEW
        return b"".join(pairs[token] for token in tokens).decode(errors="replace")

    deltas = stream_all(TextStream(decode), [[token] for token in range(len(pairs))])
    assert "".join(deltas) == "x" + text


# Stop strings.


def stream_bytes(
    encoded: bytes, cuts: Sequence[int], stop: Sequence[str]
) -> tuple[str, str | None]:
    """Return the streamed text of bytes as tokens that end at `cuts`, and the stop string."""
    ends = sorted({min(cut, len(encoded)) for cut in cuts} | {len(encoded)})
    tokens = [encoded[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    stream = TextStream(
        lambda ids: b"".join(tokens[n] for n in ids).decode(errors="replace"), stop=stop
    )
    text = "".join(stream_all(stream, [[n] for n in range(len(tokens))]))
    return text, stream.stopped


def reference_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string by its definition: check every prefix."""
    for end in range(len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


_LETTERS = st.sampled_from(["a", "b", "é", "😀"])


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(_LETTERS, max_size=24).map("".join),
    st.lists(st.integers(0, 60), max_size=24),
    st.lists(st.lists(_LETTERS, min_size=1, max_size=4).map("".join), max_size=3),
)
def test_any_token_split_yields_the_same_text(text: str, cuts: list[int], stop: list[str]) -> None:
    assert stream_bytes(text.encode(), cuts, stop) == reference_stop(text, stop)


@pytest.mark.parametrize(
    ("stop", "text", "stopped"),
    [
        (["nine"], "one two three", None),
        (["two"], "one ", "two"),
        (["three", "two"], "one ", "two"),
        (["one two", "two", "wo"], "", "one two"),
        (["n", "one"], "o", "n"),
        (["two three", "two th"], "one ", "two th"),
        (["three four"], "one two three", None),
    ],
)
def test_the_first_complete_stop_string_ends_the_text(
    stop: list[str], text: str, stopped: str | None
) -> None:
    for cuts in ((), (5,), range(20)):
        assert stream_bytes(b"one two three", cuts, stop) == (text, stopped)


def test_possible_stop_string_prefix_is_buffered() -> None:
    stream = TextStream(ByteTokenizer().detokenize, stop=["</s>", "<b>"])
    assert [stream.push([byte]) for byte in b"a</x<"] == ["a", "", "", "</x", ""]
    assert stream.push(b"/s>more") == ""
    assert stream.stopped == "</s>"
    assert stream.push(b"more", finished=True) == ""


def test_stop_strings_are_not_searched_in_the_prompt() -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer.detokenize, tokenizer.tokenize("stop st"), stop=["stop"])
    assert stream.push(b"op st", finished=True) == "op st"
    assert stream.stopped is None


@pytest.mark.parametrize("stop", [[""], ["a", ""], "ab"])
def test_invalid_stop_strings_are_refused(stop: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="stop is"):
        TextStream(ByteTokenizer().detokenize, stop=stop)
