# SPDX-License-Identifier: Apache-2.0
"""Steps of training and of decoding, measured over the null device; run by `tools.nullcuda`.

python -m tools.nullcuda.steps --output FILE [--only NAME ...]

Each step is run until nothing in it is done for the first time, then measured over a few more:
launches, copies, waits of the host, the peak of memory, and the host's milliseconds. Calls that
CUDA refuses are counted from the beginning, captures included. `--trace 30` also prints which
kernels and Python lines most of the calls of each step come from.

Steps of one rank of several run over torch's fake process group: collectives are called and move
nothing. Where the host would read from another rank how many rows come, it reads 0, so that only
its waits mean anything.
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
from typing import Any

import torch
import triton
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.device import CudaRecorder
from megatron.core.distributed import DataParallel
from megatron.core.inference import EngineRequest
from megatron.core.inference.sampling import SamplingParams
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import CapacityCheck, MoEConfig, RouterConfig, capacities_of
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import LatentAttentionConfig
from megatron.training.step import ForwardBackward, FullIterationGraph, Microbatch, TrainStep
from tools.bench import gpu_engine, mcore_step, shapes
from tools.bench.gpu_engine import GREEDY, SAMPLED, SMALL, Way
from tools.bench.gpu_train import LLAMA_1_3B, hybrid_config
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
#: (steps before, measured steps)
TRAINING_STEPS, DECODE_STEPS = (3, 4), (10, 16)
ROWS, NEW_TOKENS = 8, 40
#: Of an engine.
MAX_ROWS, BLOCKS = 2 * ROWS, 256
EXPERTS = MoEConfig(num_experts=64, ffn_hidden_size=1024, router=RouterConfig(topk=8))
EXPERT_LAYERS, EXPERT_RANKS = 4, 4
#: Of ranks of experts, times the even share.
CAPACITY = 1.25
#: As DeepSeek-V2 and V3 have it, with the heads of the 1.3 B shape; and of the small shape.
LATENT = LatentAttentionConfig(
    num_attention_heads=LLAMA_1_3B.heads,
    q_lora_rank=1536,
    kv_lora_rank=512,
    nope_channels=128,
    rope_channels=64,
    value_channels=128,
)
SMALL_LATENT = LatentAttentionConfig(
    num_attention_heads=SMALL.heads,
    q_lora_rank=None,
    kv_lora_rank=128,
    nope_channels=64,
    rope_channels=32,
    value_channels=64,
)


def training(
    config: GPTConfig | None,
    *,
    batch: int,
    layers: int = LLAMA_1_3B.layers,
    trace: int = 0,
    **options: Any,
) -> dict:
    """Measure a training step of the 1.3 B shape: forward, backward, clip, AdamW, loss to the host.

    Args:
        config: of another model of that shape.
        batch: rows of a microbatch.
        layers: of the model.
        trace: see `traced`.
        options: groups and backend, see `mcore_step.training_parts`.
    """
    shape = dataclasses.replace(LLAMA_1_3B, batch=batch, layers=layers)
    step, model, _ = mcore_step.training_parts(
        shape, bf16=True, device=torch.device("cuda"), config=config, **options
    )
    weights = sum(parameter.numel() for parameter in model.parameters())
    counts = measured(step, *TRAINING_STEPS, trace=trace)
    return counts | {
        "weights": weights,
        "tokens": batch * shape.sequence,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def expert_parallel(
    config: GPTConfig, dispatcher: str, capacity: float | None, *, batch: int, trace: int = 0
) -> dict:
    """Measure a training step of one of the ranks that share experts.

    Without a capacity it measures only host waits: all sizes are 0.
    """
    backend = dataclasses.replace(
        LOCAL, dispatcher=dispatcher, expert_rank_capacity_factor=capacity
    )
    with one_of(EXPERT_RANKS) as groups:
        counts = training(
            config, batch=batch, layers=EXPERT_LAYERS, trace=trace, groups=groups, backend=backend
        )
    return counts if capacity is not None else {"waits": counts["waits"]}


def expert_parallel_run(
    config: GPTConfig, dispatcher: str, capacity: float | None, *, evaluates: bool, trace: int = 0
) -> dict:
    """Measure what the training loop does on one of the ranks that share experts: a step that is
    recorded as a CUDA graph, or an evaluation of one microbatch."""
    device = torch.device("cuda")
    backend = dataclasses.replace(
        LOCAL, dispatcher=dispatcher, expert_rank_capacity_factor=capacity
    )
    with one_of(EXPERT_RANKS) as groups:
        model = GPTModel(
            config, groups, seed=shapes.SEED, dtype=torch.bfloat16, device=device, backend=backend
        )
        engine = DataParallel(model.store, groups)
        optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(clip_grad=1.0))
        recorder = CudaRecorder(device, "steps")
        run = FullIterationGraph(ForwardBackward(model, engine), recorder=recorder, warmup_steps=2)
        names = model.config.router_names
        check = CapacityCheck(capacities_of(model), names, world=groups["world"], device=device)
        step = TrainStep(
            model,
            engine,
            optimizer=optimizer,
            groups=groups,
            forward_backward=run,
            capacities=None if capacity is None else check,
        )
        rows = torch.zeros((2, LLAMA_1_3B.sequence), dtype=torch.int64, device=device)
        layout = SequenceLayout.of_rows(LLAMA_1_3B.sequence, device=device)
        layout = layout.with_samples(torch.arange(len(rows), device=device))
        batches = [Microbatch(rows, rows, torch.ones_like(rows, dtype=torch.float32), layout)]
        if evaluates:
            counts = measured(partial(step.evaluate, batches), *TRAINING_STEPS, trace=trace)
            return {"waits": counts["waits"]}
        counts = measured(
            partial(step, batches, lr=1e-4, weight_decay=0.0), *TRAINING_STEPS, trace=trace
        )
        if run.replays < TRAINING_STEPS[1]:
            raise RuntimeError(f"{run.replays} of {TRAINING_STEPS[1]} steps were replayed")
        return counts


@contextlib.contextmanager
def one_of(ranks: int) -> Iterator[ProcessGroupCollection]:
    """Return the groups of the first expert-parallel rank; the other ranks do not exist."""
    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=store)
    try:
        yield ProcessGroupCollection.create(RankGrid(world_size=ranks, ep=ranks), rank=0)
    finally:
        torch.distributed.destroy_process_group()


def decoding(
    build: Callable[[], GPTModel], way: Way, sampling: SamplingParams, *, trace: int = 0
) -> dict:
    """Measure decode steps of an engine, after the steps that compute prompts and record graphs.

    The memory peak covers all measured steps, without the models of other cases.
    """
    model = build()
    parameters = list(model.parameters())
    model_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    other_bytes = torch.cuda.memory_allocated() - model_bytes
    torch.cuda.reset_peak_memory_stats()
    engine = gpu_engine.engine_of(model, way, rows=MAX_ROWS, num_blocks=BLOCKS)
    for row in range(ROWS):
        engine.add(
            EngineRequest(
                prompt=tuple(range(5, 40 + row)), max_new_tokens=NEW_TOKENS, sampling=sampling
            )
        )
    with plausible_tokens():
        counts = measured(engine.step, *DECODE_STEPS, trace=trace)
    return counts | {
        "weights": sum(parameter.numel() for parameter in parameters),
        "peak_bytes": torch.cuda.max_memory_allocated() - other_bytes,
    }


def measured(step: Callable[[], object], before: int, steps: int, *, trace: int) -> dict:
    """Return the average figures of a step.

    Args:
        step: the step; it runs `before` + `steps` times.
        before: number of warm-up steps.
        steps: number of measured steps.
        trace: see `traced`.
    """
    for _ in range(before):
        step()
    begin, cpu = counters(), time.process_time()
    with traced(trace, steps):
        for _ in range(steps):
            step()
    milliseconds = 1e3 * (time.process_time() - cpu) / steps
    counts = since(begin)
    return {name: round(counts[name] / steps, 2) for name in COUNTS} | {
        "host_cpu_ms": round(milliseconds, 2)
    }


def cases() -> dict[str, Callable[..., dict]]:
    """Return the measured steps by name."""
    hybrid = hybrid_config()
    experts = dataclasses.replace(
        mcore_step.config_of(dataclasses.replace(LLAMA_1_3B, layers=EXPERT_LAYERS)),
        ffn_pattern="E" * EXPERT_LAYERS,
        moe=EXPERTS,
    )
    latent = dataclasses.replace(mcore_step.config_of(LLAMA_1_3B), attention=LATENT)
    cases_by_name: dict[str, Callable[..., dict]] = {
        "training, llama 1.3 B, microbatch 2": partial(training, None, batch=2),
        "training, hybrid 1.3 B, microbatch 2": partial(training, hybrid, batch=2),
        "training, latent attention, microbatch 2": partial(training, latent, batch=2),
        f"training, {EXPERT_LAYERS} layers of {EXPERTS.num_experts} experts, microbatch 2": partial(
            training, experts, batch=2, layers=EXPERT_LAYERS
        ),
    }
    for dispatcher, capacity in itertools.product(("alltoall", "allgather"), (None, CAPACITY)):
        limit = "no capacity" if capacity is None else f"capacity {capacity}"
        name = f"training, experts on {EXPERT_RANKS} ranks, {dispatcher}, {limit}, microbatch 2"
        cases_by_name[name] = partial(expert_parallel, experts, dispatcher, capacity, batch=2)
        run = partial(expert_parallel_run, experts, dispatcher, capacity)
        cases_by_name[name.replace("training", "evaluation")] = partial(run, evaluates=True)
        if capacity is not None:
            cases_by_name[f"{name}, graph"] = partial(run, evaluates=False)
    ways = [Way(a, g) for g, a in itertools.product((False, True), (False, True))]
    kinds = {"gpt": SMALL, "hybrid": SMALL, "moe": SMALL, "latent": SMALL, "1.3 B": LLAMA_1_3B}
    for kind, shape in kinds.items():
        model = functools.cache(partial(model_of, kind, shape))
        for way in ways[-1:] if shape is LLAMA_1_3B else ways:
            for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
                cases_by_name[f"decode, {kind}, {name}, {way}"] = partial(
                    decoding, model, way, sampling
                )
    return cases_by_name


def model_of(kind: str, shape: Shape) -> GPTModel:
    """Return a model of a kind, "latent" or see `gpu_engine.config_of`, in bf16 on the device."""
    config = gpu_engine.config_of(kind, shape, tiny=False)
    if kind == "latent":
        config = dataclasses.replace(config, attention=SMALL_LATENT)
    return GPTModel(
        config,
        ProcessGroupCollection.single(),
        seed=shapes.SEED,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )


def described(counts: dict) -> str:
    """Return the counts that are not zero as text."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


@contextlib.contextmanager
def traced(lines: int, steps: int) -> Iterator[None]:
    """Print the most frequent calls of a step, with the Python lines that they come from.

    Args:
        lines: to print; 0 traces nothing.
        steps: of the block.
    """
    if not lines:
        yield
        return
    with calls() as seen:
        yield
    for (counter, name, line), count in seen.most_common(lines):
        print(f"{count / steps:8.1f} {counter:16} {name[-70:]:70} {line}")


def main() -> int:
    """Measure and write the figures; the exit code is 0 if all cases ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=None, help="parts of names")
    parser.add_argument("--trace", type=int, default=0, help="lines that calls come from")
    options = parser.parse_args()
    measured_steps: dict[str, dict] = {}
    problems: dict[str, str] = {}
    for name, case in cases().items():
        if options.only and not any(pattern in name for pattern in options.only):
            continue
        begin = counters()
        # Else a case would have the workspaces of the cases before it.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats()
        try:
            report = case(trace=options.trace)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            problems[name] = f"{type(error).__name__}: {lines[0]}"
        else:
            faults = since(begin)
            measured_steps[name] = report | {fault: faults[fault] for fault in FAULTS}
            print(f"gpu-null: {name}: {described(measured_steps[name])}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    report = {"versions": versions, "steps": measured_steps, "problems": problems}
    options.output.write_text(json.dumps(report), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
