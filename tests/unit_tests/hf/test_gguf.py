# SPDX-License-Identifier: Apache-2.0
"""GGUF files: logits against transformers, import, and hostile headers."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import tokenizers
import torch

from megatron.cli.tokenizers import HuggingFaceTokenizer, train_bpe
from megatron.core import RankGrid
from megatron.core.dist_checkpointing import Solo, weight_chunks
from megatron.core.models import GPTModel
from megatron.core.ops.matmul import amd_cpu
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import Storage
from megatron.hf import open_folder, read_folder
from megatron.hf.read_weights import read_weights
from megatron.training.data.chat import read_chat_template
from tests.support.closeness import assert_close_by_metric
from tests.support.gguf_files import reference_logits, write_gguf
from tests.support.hf_converter import checkpoint_model, convert, read_by_a_rank
from tests.support.hf_folders import VOCABULARY
from tests.support.inputs import generator, one_thread
from tests.support.llama_tokenizer import TEMPLATE, write_llama_tokenizer
from tests.support.ranks import run_ranks

TOKENS = torch.randint(VOCABULARY, (2, 19), generator=generator(6))


def logits_of(path: Path) -> torch.Tensor:
    """Return the fp32 logits of a GGUF file."""
    folder = open_folder(path)
    described = read_folder(folder)
    model = GPTModel(
        described.config, ProcessGroupCollection.single(), storage=Storage(initialize=False)
    )
    read_weights(folder, described, weight_chunks(model.store), coordinator=Solo())
    with torch.no_grad():
        return model.full_logits(TOKENS)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("llama-3to1", "F32"),
        ("llama-3to1", "F16"),
        ("qwen2-3to1-linear", "BF16"),
        ("llama-3to1", "Q8_0"),
        ("qwen3-8to1", "Q4_K"),
        ("llama-3to1", "Q5_K"),
        ("qwen2-3to1-linear", "Q6_K"),
    ],
)
def test_logits_match_transformers(
    case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The products of transformers, whose sums have another order than oneDNN's.
    monkeypatch.setattr(amd_cpu, "is_mkl_on_amd", lambda: False)
    path = tmp_path / "model.gguf"
    rope = {"rope_type": "default", "rope_theta": 500.0}
    model = write_gguf(path, case, kind, rope_parameters=rope)
    with one_thread():
        expected = reference_logits(path, model, TOKENS)
    assert_close_by_metric("logits", logits_of(path), expected)


def logits_of_a_rank(rank: int, world: int, path: Path) -> torch.Tensor:
    """Read the slices of one of two tensor-parallel ranks and return the logits."""
    model, _, _ = read_by_a_rank(rank, path, RankGrid(world_size=world, tp=2))
    with torch.no_grad():
        return model.full_logits(TOKENS)


def test_ranks_read_parts_of_blocks_and_imports_agree(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama-3to1", "Q4_K", intermediate_size=256)
    expected = logits_of(path)
    for logits in run_ranks(logits_of_a_rank, 2, tmp_path):
        assert_close_by_metric("logits", logits, expected)
    convert("import", "--hf", path, "--save", tmp_path / "a", "--dtype", "float32")
    with torch.no_grad():
        model = checkpoint_model(tmp_path / "a" / "iter_0000000")
        assert torch.equal(model.full_logits(TOKENS), expected)


def sentencepiece_metadata() -> dict[str, object]:
    """Return a vocabulary of Llama's kind: the tokens of the tests' reference tokenizer."""
    words = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    words += ["th", "the", "\u2581the", "\u2581a", "of", "in"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


TEXTS = ("the of a", " the  cat in\na hat", "é 日本", "", "</s> a")


def test_sentencepiece_tokenizer_matches_transformers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    metadata = sentencepiece_metadata()
    # The merges of the reference, in its order: the union of a merge has the score of its rank.
    order = ["th", "the", "\u2581the", "\u2581a", "of", "in"]
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = [-float(order.index(t)) if t in order else -100.0 for t in tokens]
    metadata["tokenizer.ggml.scores"] = scores
    size = {"vocab_size": len(tokens)}
    write_gguf(path, "llama-3to1", "F32", metadata=metadata, **size)
    reference = write_llama_tokenizer(tmp_path / "reference")
    tokenizer = HuggingFaceTokenizer(path)
    for text in TEXTS:
        ids = reference.encode(text)
        assert tokenizer.tokenize(text) == ids
        assert tokenizer.detokenize(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.eod == 2
    messages = [{"role": "user", "content": "a"}]
    template = read_chat_template(None, tokenizer_model=path)
    with contextlib.closing(template):
        rendered = template.render(messages)
    assert rendered == reference.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("gpt-2", None), ("llama-bpe", r"\p{N}{1,3}"), ("qwen2", r"\p{N}")],
)
def test_byte_level_tokenizer_matches_the_library(pre: str, pattern: str | None, tmp_path) -> None:
    trained = train_bpe(["the cat's 12345 hats\n\n are  there"] * 4, 300, tmp_path / "t.json")
    described = json.loads(trained.to_json())
    vocabulary = described["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get)]
    end = tokens.index("<|endoftext|>")
    path = tmp_path / "model.gguf"
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if n == end else 1 for n in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.add_bos_token": pre == "llama-bpe",
    }
    write_gguf(path, "llama-3to1", "F32", metadata=metadata, vocab_size=len(tokens))
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [tuple(m) for m in described["model"]["merges"]])
    )
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        words = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + pattern
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
        level = tokenizers.pre_tokenizers.Sequence([split, level])
    library.pre_tokenizer = level
    tokenizer = HuggingFaceTokenizer(path)
    before = [end] if pre == "llama-bpe" else []
    for text in ("the cat's 12345  hats", "There\n\n are é日 1", ""):
        assert tokenizer.tokenize(text) == before + library.encode(text).ids
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.eod == end


def cpu_seconds_and_bytes(path: Path) -> tuple[float, int, str]:
    """Return CPU seconds and peak bytes of opening a file that is refused, and the error."""
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        open_folder(path)
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, peak, str(caught.value)


def header(num_tensors: int = 0, num_values: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + body


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def entry(kind: int, value: bytes, name: bytes = b"a") -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(dims: tuple[int, ...], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


HUGE = (1 << 63) + 5
HOSTILE = {
    "no file": b"",
    "magic": b"GGML" + bytes(40),
    "version": header(version=1),
    "big-endian": header(version=3 << 24),
    "tensors": header(num_tensors=HUGE),
    "values": header(num_values=HUGE),
    "name length": header(num_values=1, body=text(b"a", HUGE)),
    "text length": header(num_values=1, body=entry(8, text(b"a", HUGE))),
    "list of texts": header(num_values=1, body=entry(9, struct.pack("<IQ", 8, HUGE))),
    "list of numbers": header(num_values=1, body=entry(9, struct.pack("<IQ", 4, HUGE))),
    "nested lists": header(num_values=1, body=entry(9, struct.pack("<IQ", 9, 1)) * 9),
    "value type": header(num_values=1, body=entry(77, b"")),
    "value twice": header(num_values=2, body=entry(0, b"1") * 2),
    "not UTF-8": header(num_values=1, body=entry(8, text(b"\xff"))),
    "alignment": header(num_values=1, body=entry(4, bytes(4), b"general.alignment")),
    "dimensions": header(num_tensors=1, body=tensor((1,) * 5)),
    "many dimensions": header(num_tensors=1, body=text(b"t") + struct.pack("<I", (1 << 32) - 1)),
    "sizes": header(num_tensors=1, body=tensor((HUGE, HUGE, HUGE))),
    "offset": header(num_tensors=1, body=tensor((8,), offset=HUGE) + bytes(999)),
    "unaligned": header(num_tensors=1, body=tensor((8,), offset=4) + bytes(999)),
    "rows of blocks": header(num_tensors=1, body=tensor((250,), kind=12) + bytes(999)),
    "tensor type": header(num_tensors=1, body=tensor((8,), kind=2) + bytes(999)),
    "overlap": header(num_tensors=2, body=tensor((8,)) + tensor((8,), name=b"u") + bytes(999)),
    "tensor twice": header(num_tensors=2, body=tensor((8,)) * 2 + bytes(999)),
    "architecture": header(
        num_values=1, body=entry(8, text(b"mamba"), b"general.architecture") + bytes(99)
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_lying_headers_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[name])
    seconds, peak, error = cpu_seconds_and_bytes(path)
    assert "\n" not in error
    assert seconds < 1
    assert peak < 3 << 20
    assert convert("import", "--hf", path, "--save", tmp_path / "a", code=2).count("\n") == 1


@pytest.mark.parametrize("value", [b"", b"ab", b"x" * 100])
def test_long_lists_take_bytes_in_proportion_to_the_file(value: bytes, tmp_path: Path) -> None:
    costs = []
    for size in (1 << 20, 4 << 20):
        count = size // (8 + len(value))
        texts = struct.pack("<IQ", 8, count) + text(value) * count
        path = tmp_path / "model.gguf"
        path.write_bytes(header(num_values=1, body=entry(9, texts)))
        seconds, peak, _ = cpu_seconds_and_bytes(path)
        costs.append((seconds, peak))
        assert peak < 24 * size + (4 << 20)
    assert costs[1][1] < 5 * costs[0][1]


def test_header_above_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(header(num_values=1, body=entry(9, struct.pack("<IQ", 0, 1 << 30))))
        file.truncate(2 << 30)  # a sparse file
    _, peak, error = cpu_seconds_and_bytes(path)
    assert "exceeds the limit" in error
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window is 8"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.vocab_size": 263, "tokenizer.ggml.model": "t5"}, None),
    ],
)
def test_values_that_change_the_model_are_refused(metadata, words, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama-3to1", "F32", metadata=metadata)
    if words is None:
        assert open_folder(path).tokenizer is None
        with pytest.raises(ValueError, match="--tokenizer-model"):
            HuggingFaceTokenizer(path)
    else:
        with pytest.raises(ValueError, match=words):
            open_folder(path)


def test_llama3_scaling_is_read_from_the_factors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = write_gguf(path, "llama-3to1", "F32", rope_parameters=scaling, rope_factors=True)
    with one_thread():
        expected = reference_logits(path, model, TOKENS)
    assert_close_by_metric("logits", logits_of(path), expected)
    assert open_folder(path).config["rope_scaling"]["factor"] == 8.0
