# SPDX-License-Identifier: Apache-2.0
"""Steps of training and of decoding, measured over the null device; run by `tools.nullcuda`.

python -m tools.nullcuda.steps --output FILE [--only NAME ...]

Each step is run until nothing in it is done for the first time, then measured over a few more:
launches, copies, waits of the host, and the host's milliseconds. Calls that CUDA refuses are
counted from the beginning, captures included. `--trace 30` also prints which kernels and Python
lines most of the calls of each case come from, those before the measured steps included.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import triton

from megatron.core.device import CudaRecorder
from megatron.core.inference import CacheShapes, Engine, EngineConfig, Request
from megatron.core.inference.engine import EngineFeatures
from megatron.core.inference.sampling import SamplingParams
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.process_groups import ProcessGroupCollection
from tools.bench import gpu_engine, gpu_hybrid, ours, shapes
from tools.bench.gpu_engine import GREEDY, SAMPLED, SMALL, Way
from tools.bench.gpu_train import LLAMA_1_3B
from tools.bench.shapes import Shape
from tools.nullcuda.device import calls, counters, since
from tools.nullcuda.record import FAULTS
from tools.nullcuda.values import plausible_tokens

#: Measured of each step, in the record; the host's milliseconds stand beside them, unchecked.
COUNTS = (
    "torch_launches",
    "triton_launches",
    "graph_launches",
    "graph_nodes",
    "copies_to_host",
    "copies_from_host",
    "copies_on_device",
    "fills",
    "waits",
)
WARMUP, STEPS = 3, 4
ROWS, NEW_TOKENS, DECODE_WARMUP = 8, 40, 10
EXPERTS = MoEConfig(num_experts=64, ffn_hidden_size=1024, router=RouterConfig(topk=8))
EXPERT_LAYERS = 4


def training(config: GPTConfig | None, *, batch: int, layers: int = LLAMA_1_3B.layers) -> dict:
    """Measure a training step of the 1.3 B shape: forward, backward, clip, AdamW, loss to the host.

    Args:
        config: of another model of that shape.
        batch: rows of a microbatch.
        layers: of the model.
    """
    shape = dataclasses.replace(LLAMA_1_3B, batch=batch, layers=layers)
    step, model, _ = ours.training_parts(
        shape, bf16=True, device=torch.device("cuda"), config=config
    )
    weights = sum(parameter.numel() for parameter in model.parameters())
    for _ in range(WARMUP):
        step()
    begin, cpu = counters(), time.process_time()
    for _ in range(STEPS):
        step()
    found = per_step(begin, cpu, STEPS)
    return found | {
        "weights": weights,
        "tokens": batch * shape.sequence,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def decoding(build: Callable[[], GPTModel], way: Way, sampling: SamplingParams) -> dict:
    """Measure decode steps of an engine, after those that compute prompts and record graphs."""
    model = build()
    device = model.store.device
    features = EngineFeatures(
        make_recorder=(lambda: CudaRecorder(device, "steps")) if way.graphs else None
    )
    engine = Engine(
        model,
        EngineConfig(max_rows=2 * ROWS, num_blocks=256, asynchronous=way.asynchronous),
        shapes=CacheShapes.of(model.modules(), model.store.dtype),
        max_length=1024,
        vocab_size=model.config.vocab_size,
        device=device,
        features=features,
    )
    for row in range(ROWS):
        engine.add(
            Request(prompt=tuple(range(5, 40 + row)), max_new_tokens=NEW_TOKENS, sampling=sampling)
        )
    steps, begin, cpu = 0, counters(), 0.0
    while engine.unfinished and steps < DECODE_WARMUP + 16:
        if steps == DECODE_WARMUP:
            begin, cpu = counters(), time.process_time()
        with plausible_tokens():
            engine.step()
        steps += 1
    return per_step(begin, cpu, steps - DECODE_WARMUP)


def per_step(begin: dict, cpu: float, steps: int) -> dict:
    """Return what a step does, on average, since a reading of counters and of the clock."""
    found = since(begin)
    milliseconds = 1e3 * (time.process_time() - cpu) / steps
    return {name: round(found[name] / steps, 2) for name in COUNTS} | {
        "host_cpu_ms": round(milliseconds, 2)
    }


def cases() -> dict[str, Callable[[], dict]]:
    """Return the measured steps by name."""
    hybrid = gpu_hybrid.config_of(LLAMA_1_3B, gpu_hybrid.DELTA, gpu_hybrid.PATTERN)
    experts = dataclasses.replace(
        ours.config_of(dataclasses.replace(LLAMA_1_3B, layers=EXPERT_LAYERS)),
        ffn_pattern="E" * EXPERT_LAYERS,
        moe=EXPERTS,
    )
    found: dict[str, Callable[[], dict]] = {
        "training, llama 1.3 B, microbatch 2": partial(training, None, batch=2),
        "training, hybrid 1.3 B, microbatch 2": partial(training, hybrid, batch=2),
        f"training, {EXPERT_LAYERS} layers of {EXPERTS.num_experts} experts, microbatch 2": partial(
            training, experts, batch=2, layers=EXPERT_LAYERS
        ),
    }
    ways = [Way(a, g) for g, a in itertools.product((False, True), (False, True))]
    for kind, shape in (("gpt", SMALL), ("hybrid", SMALL), ("moe", SMALL), ("1.3 B", LLAMA_1_3B)):
        model = functools.cache(partial(model_of, kind, shape))
        for way in ways[-1:] if shape is LLAMA_1_3B else ways:
            for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
                found[f"decode, {kind}, {name}, {way}"] = partial(decoding, model, way, sampling)
    return found


def model_of(kind: str, shape: Shape) -> GPTModel:
    """Return a model of a kind, see `gpu_engine.config_of`, in bf16 on the device."""
    return GPTModel(
        gpu_engine.config_of(kind, shape, tiny=False),
        ProcessGroupCollection.single(),
        seed=shapes.SEED,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )


def described(counts: dict) -> str:
    """Return counts as text, without those that are zero."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


@contextlib.contextmanager
def traced(lines: int) -> Iterator[None]:
    """Print the most frequent calls of a block with the lines that they come from, if any."""
    if not lines:
        yield
        return
    with calls() as seen:
        yield
    for (counter, name, line), count in seen.most_common(lines):
        print(f"{count:8,} {counter:18} {name[-80:]:80} {line}")


def main() -> int:
    """Measure and write what was found; the exit code says whether all cases ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=None, help="parts of names")
    parser.add_argument("--trace", type=int, default=0, help="lines that calls come from")
    options = parser.parse_args()
    measured: dict[str, dict] = {}
    problems: dict[str, str] = {}
    for name, case in cases().items():
        if options.only and not any(part in name for part in options.only):
            continue
        begin = counters()
        torch.cuda.reset_peak_memory_stats()
        try:
            with traced(options.trace):
                found = case()
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            problems[name] = f"{type(error).__name__}: {lines[0]}"
        else:
            faults = since(begin)
            measured[name] = found | {fault: faults[fault] for fault in FAULTS}
            print(f"gpu-null: {name}: {described(measured[name])}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found = {"versions": versions, "steps": measured, "problems": problems}
    options.output.write_text(json.dumps(found), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
