# SPDX-License-Identifier: Apache-2.0
"""The engine's benchmark: its requests, its figures, and refused options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.inference import EngineRequest
from megatron.inference import build_engine, generate
from megatron.inference.bench import Load, arrival_times, main, make_requests, static_waste
from tests.support.arguments import last_wins
from tests.support.commands import refusal, run, run_on_ranks
from tests.support.op_tape import OpTape, TapeRecorder


def arguments(root: Path, *words: str) -> list[str]:
    requests = ["--num-requests", "6", "--input-tokens", "40", "--max-output-tokens", "20"]
    return last_wins(["--load", str(root), "--device", "cpu", *requests, *words])


@pytest.mark.parametrize("rate", [None, "200"])
def test_generated_tokens_and_latencies_are_reported(
    root: Path, tmp_path: Path, rate: str | None
) -> None:
    path = tmp_path / "bench.json"
    words = [*arguments(root), "--shared-prefix-tokens", "33", "--repeats", "2"]
    words += ["--output-json", str(path)]
    mode = ("--request-rate", rate) if rate else ("--async-scheduling", "--inference-cuda-graphs")
    with mock.patch.object(
        build_engine, "CudaRecorder", side_effect=lambda *_, **__: TapeRecorder(OpTape())
    ):
        code, out, err, _ = run(main, [*words, *mode])
    assert code == 0, err
    report = json.loads(path.read_text(encoding="utf-8"))
    lengths = [request.max_new_tokens for request in six_requests()]
    assert report["output_tokens"] == sum(lengths)
    assert 8 <= min(lengths) < max(lengths) <= 20
    assert report["prefix_hit"] == 3 * 5 * 32  # in each repeat, except the first request
    assert report["tokens_per_second_least"] <= report["tokens_per_second"]
    assert 0 < report["itl_p50_ms"] <= report["itl_p99_ms"]
    assert 0 < report["ttft_p50_ms"] <= report["ttft_p99_ms"]
    assert 0 < report["host_us_per_step"] < 1e5
    assert report["most_rows"] == 6 if rate is None else 1 <= report["most_rows"] <= 6
    assert report["cache_bytes"] >= report["most_cached_tokens"] * 2 * 2 * 2 * 8 * 4
    assert report["loop"] == ("asynchronous" if rate is None else "synchronous")
    assert (report["planning_hidden"] > 0) == (rate is None)
    if rate is None:
        assert report["graphs_captured"] in (3, 4)  # for up to 1, 2, 4 and 8 rows
        assert report["graph_hits"] > report["graphs_captured"]
        assert report["graph_capture_seconds"] > 0
        assert report["graph_eager_steps"] >= 3 * 2  # the prompt steps of every repeat
        # Each replay compares the pages of two layers and the inputs.
        assert report["graph_addresses_equal"] == report["graph_hits"] * (2 + 1)
    assert report["wasted_tokens"] == 0  # every length is known in advance
    assert f"{report['output_tokens']:,}" in out


def test_generate_reports_graph_statistics(root: Path) -> None:
    recorders: list[TapeRecorder] = []

    def recorder(*_: object, **__: object) -> TapeRecorder:
        recorders.append(TapeRecorder(OpTape()))
        return recorders[-1]

    words = ["--load", str(root), "--device", "cpu", "--prompt", "A", "--max-new-tokens", "6"]
    with mock.patch.object(build_engine, "CudaRecorder", side_effect=recorder):
        outcome = run(generate.main, [*words, "--inference-cuda-graphs", "--top-k", "1"])
    assert outcome.code == 0
    line = next(line for line in outcome.err.splitlines() if "CUDA graphs" in line)
    numbers = [float(word) for word in re.findall(r"[\d.]+", line)]
    captured, _, replayed, buffers, eager = numbers
    assert captured == sum(tape_recorder.captures for tape_recorder in recorders) > 0
    assert replayed == sum(tape_recorder.tape.replays for tape_recorder in recorders)
    assert (replayed + eager, buffers) == (6, 2 + 1)


TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2")


def test_cpu_steps_are_recorded_unless_enforce_eager_is_set(root: Path) -> None:
    words = ["--load", str(root), "--device", "cpu", "--prompt", "AB", "--max-new-tokens", "6"]
    texts = []
    for eager_flags in ((), ("--enforce-eager",)):
        code, out, err, _ = run(generate.main, [*words, "--top-k", "1", *eager_flags])
        assert code == 0
        texts.append(out)
        recorded = re.search(r"CPU graphs: 1 captured .* 5 steps replayed .* 1 eager", err)
        assert (recorded is None) == bool(eager_flags), err
    assert texts[0] == texts[1]


def test_tensor_parallel_ranks_share_one_arrival_clock(root: Path) -> None:
    words = arguments(root, *TENSOR_PARALLEL, "--request-rate", "100", "--repeats", "2")
    rank_0, rank_1 = run_on_ranks(main, [*words, "--check-plans"])
    assert (rank_0.code, rank_1.code) == (0, 0), rank_0.err + rank_1.err
    assert "tokens_per_second" in rank_0.out
    assert rank_1.out == ""


def test_replicas_share_requests(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = arguments(root, "--shared-prefix-tokens", "33", "--request-rate", "100")
    words += ["--repeats", "1", "--inference-max-requests", "4", "--output-json", str(path)]
    rank_0, rank_1 = run_on_ranks(main, words)
    assert (rank_0.code, rank_1.code, rank_1.out) == (0, 0, ""), rank_0.err + rank_1.err
    report = json.loads(path.read_text(encoding="utf-8"))
    sent = [int(number) for number in report["replica_requests"].split(", ")]
    hits = [int(number) for number in report["replica_prefix_hits"].split(", ")]
    assert sum(sent) == 2 * 6  # two repeats, of which one is warm-up
    assert sent[0] > sent[1]  # replica 0 caches the prefix and is preferred while it has free rows
    assert sum(hits) == report["prefix_hit"] > 0
    assert report["output_tokens"] == sum(r.max_new_tokens for r in six_requests())


def six_requests() -> list[EngineRequest]:
    load = Load(num_requests=6, input_tokens=40, shared_prefix_tokens=33, max_output_tokens=20)
    return make_requests(load, 259)


def test_arrival_times_follow_the_request_rate() -> None:
    times = arrival_times(Load(num_requests=4000, request_rate=50.0))
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(4000 / 50, rel=0.1)
    assert arrival_times(Load(num_requests=3)) == [0.0] * 3


def test_static_batches_compute_rows_up_to_the_longest_output() -> None:
    assert static_waste([4, 2, 1, 1], 2) == pytest.approx((2 * 4 + 2 * 1) / 8)
    assert static_waste([3, 3], 16) == 1.0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num-requests", "0"], "--num-requests"),
        (["--max-output-tokens", "4"], "--min-output-tokens 8"),
        (["--shared-prefix-tokens", "32"], "--input-tokens 32"),
        (["--request-rate", "-1"], "--request-rate"),
        (["--input-tokens", "2990"], "2990"),
        (["--inference-cuda-graphs"], "--inference-cuda-graphs"),
        (["--enforce-eager", "--transformer-impl", "local"], "--transformer-impl local"),
        (["--enforce-eager", "--batch-invariant"], "--batch-invariant"),
        (["--enforce-eager", "--inference-cuda-graphs"], "--inference-cuda-graphs"),
        (["--check-plans"], "--check-plans"),
        (["--request-rate", "9", "--async-scheduling", *TENSOR_PARALLEL], "--async-scheduling"),
    ],
)
def test_invalid_bench_options_are_one_line(root: Path, words: list[str], text: str) -> None:
    assert text in refusal(run(main, ["--load", root, "--device", "cpu", *words]))
