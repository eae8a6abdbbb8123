# SPDX-License-Identifier: Apache-2.0
"""The entry points on a GPU: train, save, resume on the CPU, generate, profile."""

from __future__ import annotations

import json

import pytest

from megatron.inference.generate import main as generate
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import flags, losses, run_in_process, write_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.machine]

SHORT = "--eval-interval 0 --train-iters 8"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def test_gpu_run_matches_cpu_and_checkpoints_interchange(device, prefix, tmp_path):
    for name in ("cpu", "cuda"):
        save = f"{SHORT} --device {name} --save {tmp_path / name} --exit-interval 4"
        assert run_in_process(flags(prefix, save)) == 0
    expected = losses(tmp_path / "cpu" / "metrics.jsonl")
    assert losses(tmp_path / "cuda" / "metrics.jsonl") == pytest.approx(expected, rel=1e-4)
    runs = []
    for name, saved in (("cpu", "cuda"), ("cuda", "cpu")):
        metrics = tmp_path / f"{saved}-{name}.jsonl"
        options = f"{SHORT} --device {name} --load {tmp_path / saved} --metrics-file {metrics}"
        assert run_in_process(flags(prefix, options)) == 0
        runs.append(losses(metrics))
    assert list(runs[0]) == [5, 6, 7, 8]
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)


@pytest.mark.parametrize("dtype", ["--bf16", "--fp16 --initial-loss-scale 1024", ""])
def test_every_precision_learns(device, prefix, tmp_path, dtype):
    metrics = tmp_path / "metrics.jsonl"
    options = f"--eval-interval 0 --train-iters 30 --device cuda {dtype} --metrics-file {metrics}"
    assert run_in_process(flags(prefix, f"{options} --log-throughput")) == 0
    loss_by_step = losses(metrics)
    assert loss_by_step[30] < loss_by_step[1] - 0.5
    final_event = [e for e in read_metrics(metrics) if e["kind"] == "train"][-1]
    assert final_event["peak_memory_bytes"] >= final_event["memory_bytes"] > 0
    assert final_event["tflops"] > 0


def test_deterministic_mode_repeats_its_bits(device, prefix, tmp_path):
    runs = []
    for name in "ab":
        metrics = tmp_path / f"{name}.jsonl"
        options = f"{SHORT} --device cuda --bf16 --deterministic-mode --metrics-file {metrics}"
        assert run_in_process(flags(prefix, options)) == 0
        runs.append(losses(metrics))
    assert runs[0] == runs[1]


def test_generated_text_matches_the_cpu(device, tmp_path, capsys):
    prefix = write_tokens(tmp_path / "tokens")
    byte = "--tokenizer-type byte --vocab-size 257 --make-vocab-size-divisible-by 1"
    assert (
        run_in_process(flags(prefix, f"{SHORT} --device cuda {byte} --save {tmp_path / 's'}")) == 0
    )
    texts = []
    for name in ("cuda", "cpu"):
        out = tmp_path / f"{name}.json"
        words = ["--load", str(tmp_path / "s"), "--prompt", "ab", "--temperature", "0"]
        words += ["--max-new-tokens", "8", "--device", name, "--output-json", str(out)]
        assert generate(words, {}) == 0
        texts.append(json.loads(out.read_text())[0]["ids"])
    assert texts[0] == texts[1]


def test_profiles_hold_kernels_and_a_snapshot_is_written(device, prefix, tmp_path):
    options = f"{SHORT} --device cuda --profile --use-pytorch-profiler --profile-step-start 3"
    options += f" --profile-step-end 5 --profile-dir {tmp_path} --record-memory-history"
    assert run_in_process(flags(prefix, options)) == 0
    (trace,) = tmp_path.glob("trace_rank0_*.json")
    kinds = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "kernel" in kinds
    assert (tmp_path / "memory_snapshot_rank0.pickle").stat().st_size > 1000
