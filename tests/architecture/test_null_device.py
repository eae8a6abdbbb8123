# SPDX-License-Identifier: Apache-2.0
"""The null CUDA device without a CUDA wheel: its record, the closed form of its memory peaks, the
cache of compiled kernels, and the checks of a machine; see tools/nullcuda."""

from __future__ import annotations

import copy
import json
import tarfile
from pathlib import Path

import pytest
from triton import knobs
from triton.runtime.cache import FileCacheManager

from tools.bench.gpu_train import DELTA, LLAMA_1_3B, PATTERN
from tools.nullcuda import record, triton_cache
from tools.nullcuda.__main__ import PARTS, command_line, memory_size
from tools.nullcuda.steps import CAPACITY, LATENT

STEP = "training, llama 1.3 B, microbatch 2"


@pytest.fixture(scope="module")
def steps():
    return record.read()


def changed(steps, name, **counts):
    changed_steps = copy.deepcopy(steps)
    changed_steps[name] |= counts
    return changed_steps


def test_record_is_consistent_with_itself(steps):
    assert record.problems(steps, steps) == []
    names = {name.split(",")[0] for name in steps}
    assert names == {"training", "evaluation", "decode"}
    for word in (
        "llama",
        "hybrid",
        "latent",
        "experts",
        "moe",
        "greedy",
        "sampled",
        "graphs",
        "async",
    ):
        assert any(word in name for name in steps), word
    graphs = [counts for name, counts in steps.items() if "graph" in name]
    assert all(counts["graph_launches"] == 1 for counts in graphs)


@pytest.mark.parametrize(
    ("counts", "word"),
    [
        ({"torch_launches": 1e6}, "torch_launches"),
        ({"triton_launches": 1e6}, "triton_launches"),
        ({"peak_bytes": 45e9}, "peak_bytes"),
        ({"refused": 1}, "refused"),
        ({"outside_capture": 2}, "outside_capture"),
        ({"unsupported": 1}, "unsupported"),
        ({"waits": 3}, "waits"),
    ],
)
def test_growing_counts_are_problems(steps, counts, word):
    problems = record.problems(changed(steps, STEP, **counts), steps)
    assert problems
    assert all(STEP in line and word in line for line in problems)


def test_record_cannot_raise_fixed_limits(steps):
    """Independent of the record, decoding waits once a step, training twice, nothing is refused."""
    decode = next(name for name in steps if name.startswith("decode"))
    for name, counts in ((STEP, {"waits": 3}), (decode, {"waits": 2}), (decode, {"refused": 1})):
        measured = changed(steps, name, **counts)
        assert len(record.problems(measured, measured)) == 1


#: Bytes of a weight: bf16, an fp32 gradient, an fp32 master and two moments of Adam.
WEIGHT_BYTES = 2 + 4 + 4 + 4 + 4
SHAPE = LLAMA_1_3B
CHUNK_BYTES = 256 << 20


def attention_values() -> int:
    """Values that an attention block saves for a token: the residual stream and its norm; q|k|v, q
    and k after their rotation, the output."""
    width = SHAPE.hidden // SHAPE.heads
    heads = SHAPE.heads * width
    groups = SHAPE.kv_heads * width
    return 2 * SHAPE.hidden + (heads + 2 * groups) + (heads + groups) + heads


def latent_values() -> int:
    """The residual stream and its norm; the low-rank vectors and their norms; q, k, v and the
    output, all as wide as q; the output's values."""
    low_rank = 2 * LATENT.q_lora_rank + 2 * LATENT.kv_lora_rank + LATENT.rope_channels
    qk_width = LATENT.num_attention_heads * LATENT.query_channels
    return (
        2 * SHAPE.hidden
        + low_rank
        + 4 * qk_width
        + LATENT.num_attention_heads * (LATENT.value_channels)
    )


def mlp_values(ffn: int) -> int:
    """The residual stream and its norm; gate and up, their product."""
    return 2 * SHAPE.hidden + 3 * ffn


def delta_net_values() -> int:
    """The residual stream and its norm; the projection q|k|v|z|b|a; q, k and v after the
    convolution; the output, before and after its norm; the inverse of a chunk of 64 tokens."""
    keys = DELTA.num_key_heads * DELTA.key_channels
    values = DELTA.num_value_heads * DELTA.value_channels
    projected = 2 * keys + 2 * values + 2 * DELTA.num_value_heads
    inverse = 64 * DELTA.num_value_heads
    return 2 * SHAPE.hidden + projected + (2 * keys + values) + 2 * values + inverse


def expert_values(rows: float, ffn: int) -> float:
    """The residual stream and its norm; for each row that experts receive, the row, gate
    and up, their product, the row of output."""
    return 2 * SHAPE.hidden + rows * (SHAPE.hidden + 3 * ffn + SHAPE.hidden)


def head_bytes(tokens: int) -> int:
    """The norm's input and output, the gradient of the output; the fp32 gradient of the head; and
    while the loss is computed a chunk of fp32 logits with their bf16 gradient, twice."""
    chunk = CHUNK_BYTES // (4 * SHAPE.vocabulary) // 64 * 64 * SHAPE.vocabulary
    return 4 * 2 * tokens * SHAPE.hidden + 4 * SHAPE.vocabulary * SHAPE.hidden + (4 + 2 + 2) * chunk


PERIODS = SHAPE.layers // PATTERN.count("-")
ACTIVATIONS = {
    STEP: SHAPE.layers * (attention_values() + mlp_values(SHAPE.ffn)),
    "training, hybrid 1.3 B, microbatch 2": PERIODS
    * (
        PATTERN.count("G") * delta_net_values()
        + PATTERN.count("*") * attention_values()
        + PATTERN.count("-") * mlp_values(SHAPE.ffn)
    ),
    "training, latent attention, microbatch 2": SHAPE.layers
    * (latent_values() + mlp_values(SHAPE.ffn)),
    "training, 4 layers of 64 experts, microbatch 2": 4
    * (attention_values() + expert_values(rows=8, ffn=1024)),
}
#: With several ranks, a rank has capacity for more rows than it sends, with either dispatcher.
ACTIVATIONS |= {
    f"training, experts on 4 ranks, {dispatcher}, capacity {CAPACITY}, microbatch 2": 4
    * (attention_values() + expert_values(rows=8 * CAPACITY, ffn=1024))
    for dispatcher in ("alltoall", "allgather")
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_peak_memory_of_training_matches_closed_form(steps, name):
    counts = steps[name]
    state = WEIGHT_BYTES * counts["weights"]
    activations = 2 * counts["tokens"] * ACTIVATIONS[name] + head_bytes(counts["tokens"])
    assert counts["peak_bytes"] == pytest.approx(state + activations, rel=0.05)
    assert counts["peak_bytes"] - state == pytest.approx(activations, rel=0.05)


def test_every_recorded_step_has_a_closed_form(steps):
    named = {name for name in steps if "peak_bytes" in steps[name]}
    assert {name for name in named if name.startswith("training")} == ACTIVATIONS.keys()
    # Without a capacity the null device knows only waits; graphs have a separate memory pool.
    for name in steps.keys() - named:
        assert name.endswith(", graph") or steps[name].keys() <= {"waits", *record.FAULTS}


KEY = "ab" * 32


def written_cache(folder, monkeypatch):
    """Write a kernel to a cache like Triton, and return the cache group."""
    monkeypatch.setattr(knobs.cache, "dir", str(folder))
    manager = FileCacheManager(KEY)
    group = {
        name: manager.put(content, name, binary=isinstance(content, bytes))
        for name, content in {
            "add_kernel.cubin": b"\x7fELF" + bytes(100),
            "add_kernel.json": json.dumps({"name": "add_kernel"}),
            "add_kernel.source": "the kernel",
            "add_kernel.ttgir": "an intermediate",
        }.items()
    }
    manager.put_group("add_kernel.json", group)
    return group


def test_cache_is_reused_after_the_folder_moves(tmp_path, monkeypatch):
    group = written_cache(tmp_path / "here", monkeypatch)
    archive = tmp_path / "out/cache.tar.xz"
    size = triton_cache.pack(tmp_path / "here", archive)
    assert size == archive.stat().st_size
    assert triton_cache.pack(tmp_path / "here", tmp_path / "again.tar.xz") == size
    assert (tmp_path / "again.tar.xz").read_bytes() == archive.read_bytes()
    (tmp_path / "here").rename(tmp_path / "gone")
    assert triton_cache.unpack(archive, tmp_path / "there") == 1
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "there"))
    cached = FileCacheManager(KEY).get_group("add_kernel.json")
    assert cached is not None
    assert set(cached) == {"add_kernel.cubin", "add_kernel.json"}
    for name, path in cached.items():
        assert path.startswith(str(tmp_path / "there"))
        moved = (tmp_path / "gone").joinpath(*group[name].split("/")[-2:])
        assert moved.read_bytes() == Path(path).read_bytes()


def test_invalid_cache_archives_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        triton_cache.pack(tmp_path / "empty", tmp_path / "x.tar.xz")
    with pytest.raises(ValueError, match=r"absent\.tar\.xz"):
        triton_cache.unpack(tmp_path / "absent.tar.xz", tmp_path / "out")
    (tmp_path / "text.tar.xz").write_text("no archive")
    with pytest.raises(ValueError, match=r"text\.tar\.xz"):
        triton_cache.unpack(tmp_path / "text.tar.xz", tmp_path / "out")
    (tmp_path / "file").write_text("x")
    for name in ("../escaped", "a/b/c", "..", "key/.."):
        with tarfile.open(tmp_path / "hostile.tar.xz", "w:xz") as tar:
            tar.add(tmp_path / "file", name)
        with pytest.raises(ValueError, match=r"hostile\.tar\.xz"):
            triton_cache.unpack(tmp_path / "hostile.tar.xz", tmp_path / "out/deep")
    assert not list(tmp_path.rglob("escaped"))


def test_memory_sizes_are_parsed():
    assert memory_size("80GiB") == 80 << 30
    assert memory_size("141GB") == 141 * 10**9
    parser = command_line()
    assert parser.parse_args([]).only == list(PARTS)
    for words in (["--memory", "80"], ["--memory", "0GiB"], ["--only", "everything"]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(words)
        assert ended.value.code == 2
