# SPDX-License-Identifier: Apache-2.0
"""Training speed on one GPU: our GPT against transformers, in turns, in one run.

python -m tools.bench.gpu_train                  the 1.3 B Llama shape, sequence 4,096
python -m tools.bench.gpu_train --compiled       transformers under torch.compile too
python -m tools.bench.gpu_train --device cpu --smoke    a few steps of a tiny shape, anywhere

Each variant is a process of its own with the same share of the memory; it tries microbatch sizes
until that is full or a larger one gains nothing, and keeps its best. Then they take turns
(`turns.py`), giving back what a step no longer needs after each. TFLOP/s count the model's
operations (`megatron.training.monitoring.flops`), not those of the machine. Needs torch, triton,
numpy, safetensors and transformers, and no network.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tools.bench import ours, peers
from tools.bench.shapes import Shape
from tools.bench.table import Row, format_table
from tools.bench.turns import Step, Variant, serve, take_turns

OURS = "ours bf16"
PEER = "transformers autocast"
OTHER_PEERS = ("transformers bf16",)
COMPILED = "transformers compiled"

#: 1.34 B weights.
LLAMA_1_3B = Shape(
    layers=24,
    hidden=2048,
    ffn=5504,
    heads=16,
    kv_heads=16,
    vocabulary=32000,
    batch=1,
    sequence=4096,
)
TINY = Shape(
    layers=2, hidden=64, ffn=192, heads=4, kv_heads=2, vocabulary=512, batch=1, sequence=128
)
#: A larger microbatch is kept if it is faster by this factor.
WORTHWHILE = 1.01
PROFILE_ROWS = 25
#: Of the device's memory, what an idle variant may keep: weights, gradients, optimizer state.
IDLE_SHARE = 0.2


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(variant: str, shape: Shape, device: torch.device) -> Step:
    """Build one training step of a variant: forward, backward, clip, AdamW, loss to the host."""
    if variant == OURS:
        return ours.training_step(shape, bf16=True, device=device)
    return peers.transformers_step(shape, variant.removeprefix("transformers "), device=device)


def seconds_of(step: Step, device: torch.device, *, warmup: int = 2, steps: int = 3) -> float:
    """Return the median seconds of a step."""
    for _ in range(warmup):
        step()
    found = []
    for _ in range(steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def best_microbatch(
    sizes: Sequence[int], rate: Callable[[int], float], *, say: Callable[[str], None]
) -> int:
    """Return the size with the highest rate, trying larger ones while they pay and fit.

    Args:
        sizes: ascending.
        rate: builds, measures and frees a step of that size; returns tokens per second.
        say: told what was found.

    Raises:
        ValueError: not even the first size fits.
    """
    best, best_rate = 0, 0.0
    for size in sizes:
        try:
            found = rate(size)
        except torch.OutOfMemoryError:
            say(f"microbatch {size}: out of memory")
            break
        say(f"microbatch {size}: {found:,.0f} tokens/s")
        if found < best_rate * WORTHWHILE:
            break
        best, best_rate = size, found
    if not best:
        raise ValueError(f"a microbatch of {sizes[0]} does not fit into this device's memory")
    return best


def work(options: argparse.Namespace) -> None:
    """Be a worker: choose a microbatch, then train as asked, or profile and end."""
    device, shape = torch.device(options.device), shape_of(options)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.memory_share)

    def rate(size: int) -> float:
        step = None
        try:
            step = build(options.worker, dataclasses.replace(shape, batch=size), device)
            return size * shape.sequence / seconds_of(step, device)
        finally:
            del step
            free(device)

    def chosen() -> Shape:
        say = lambda text: print(f"bench: {options.worker}: {text}", file=sys.stderr)  # noqa: E731
        return dataclasses.replace(shape, batch=best_microbatch(options.sizes, rate, say=say))

    if options.profile:
        print(json.dumps(profile(build(options.worker, chosen(), device), device)))
        return
    sizes: list[int] = []

    def start() -> Step:
        best = chosen()
        sizes.append(best.batch)
        free(device)  # what a size that did not fit has left
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return build(options.worker, best, device)

    def facts() -> dict:
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        free(device)  # the others' turn
        return {"micro_batch_size": sizes[-1], "peak_device_bytes": peak}

    serve(start, facts)


def free(device: torch.device) -> None:
    """Give back the memory of a step that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def profile(step: Step, device: torch.device, *, steps: int = 2) -> list[dict]:
    """Return the kernels (on a CPU: operators) that a step spends most of its time in."""
    for _ in range(2):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        synchronize(device)
    on_gpu = device.type == "cuda"
    totals: dict[str, list[float]] = {}
    for event in profiler.key_averages():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        entry = totals.setdefault(event.key, [0.0, 0.0])
        entry[0] += micros / steps
        entry[1] += event.count / steps
    whole = sum(micros for micros, _ in totals.values()) or 1.0
    rows = sorted(totals.items(), key=lambda item: -item[1][0])[:PROFILE_ROWS]
    return [
        {"kernel": name, "ms": micros / 1e3, "calls": calls, "share": micros / whole}
        for name, (micros, calls) in rows
    ]


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the shape that the options ask for."""
    return TINY if options.smoke else LLAMA_1_3B


def flops_per_token(shape: Shape) -> float:
    """Return the operations of forward and backward for one token, by the training log's rule."""
    from megatron.core.models.gpt_config import GPTConfig
    from megatron.core.transformer import AttentionConfig, MLPConfig
    from megatron.training.monitoring.flops import training_flops

    model = GPTConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        vocab_size=shape.vocabulary,
        attention=AttentionConfig(
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            kv_channels=shape.hidden // shape.heads,
        ),
        mlp=MLPConfig(ffn_hidden_size=shape.ffn),
    )
    whole = training_flops(model, vocab_size=shape.vocabulary, seq_length=shape.sequence, samples=1)
    return whole / shape.sequence


def command_of(variant: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments after `python` that make a worker."""
    words = ["-m", "tools.bench.gpu_train", "--worker", variant, "--device", options.device]
    words += ["--sizes", *map(str, options.sizes), "--memory-share", str(options.memory_share)]
    return [*words, "--smoke"] if options.smoke else words


def measure(options: argparse.Namespace) -> dict:
    """Let the variants take turns and profile ours; return all numbers as JSON can hold them.

    Raises:
        ValueError: ours or the peer could not run, or a loss shows that it did other work.
    """
    shape, smoke = shape_of(options), options.smoke
    variants = [OURS, PEER, *OTHER_PEERS, *([COMPILED] if options.compiled else [])]
    rounds, steps = (2, 1) if smoke else (options.rounds, options.steps)
    options.memory_share = 1.0 - IDLE_SHARE * (len(variants) - 1)
    commands = {name: command_of(name, options) for name in variants}
    found = take_turns(commands, rounds=rounds, steps=steps, warmup=2)
    expected = math.log(shape.vocabulary)
    for name in (OURS, PEER):
        if name not in found:
            raise ValueError(f"{name} did not run; its error is above")
    for name, variant in found.items():
        if not 0.2 * expected < variant.values[0] < 1.1 * expected:
            raise ValueError(f"{name} has loss {variant.values[0]}, expected below {expected:.2f}")
    options.sizes = [found[OURS].facts["micro_batch_size"]]
    profiled = subprocess.run(
        [sys.executable, *command_of(OURS, options), "--profile"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {
        "when": datetime.datetime.now().isoformat(timespec="seconds"),
        "machine": machine(torch.device(options.device)),
        "shape": dataclasses.asdict(shape) | {"parameters": shape.parameters},
        "flops_per_token": flops_per_token(shape),
        "variants": {name: numbers(variant, shape) for name, variant in found.items()},
        "kernels": json.loads(profiled.stdout.splitlines()[-1]),
    }


def machine(device: torch.device) -> dict:
    """Return what the numbers were measured on."""
    import transformers

    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["transformers"] = transformers.__version__
    found["device"] = platform.processor() or "cpu"
    if device.type == "cuda":
        import triton

        found |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda or "",
            "triton": triton.__version__,
        }
    return found


def numbers(variant: Variant, shape: Shape) -> dict:
    """Return one variant's measurements."""
    tokens = variant.facts["micro_batch_size"] * shape.sequence
    return {
        "micro_batch_size": variant.facts["micro_batch_size"],
        "tokens_per_step": tokens,
        "seconds": variant.rounds,
        "tokens_per_second": tokens / variant.seconds(),
        "by_round": [tokens / statistics.median(steps) for steps in variant.rounds],
        "peak_bytes": variant.facts["peak_device_bytes"] or variant.peak_memory_bytes,
        "losses": variant.values,
    }


def rows_of(found: dict) -> list[Row]:
    """Turn the numbers into the rows of the one table."""
    from megatron.training.monitoring.flops import peak_flops

    variants, per_token = found["variants"], found["flops_per_token"]
    mine = variants[OURS]
    peak = peak_flops(found["machine"]["device"])

    def row(what: str, value: float, peer: float | None, ratio: float | None, target: str) -> Row:
        return Row(bench="gpu_train", what=what, ours=value, peer=peer, ratio=ratio, target=target)

    rows = []
    for name, theirs in variants.items():
        if name == OURS:
            continue
        pairs = zip(mine["by_round"], theirs["by_round"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        speeds = (mine["tokens_per_second"], theirs["tokens_per_second"])
        rows.append(row(f"tokens/s / {name}", *speeds, ratio, ">= 1.0" if name == PEER else ""))
    tflops = mine["tokens_per_second"] * per_token / 1e12
    theirs = variants[PEER]["tokens_per_second"] * per_token / 1e12
    rows.append(row(f"TFLOP/s / {PEER}", tflops, theirs, None, ""))
    if peak is not None:
        what = f"share of {peak / 1e12:,.0f} TFLOP/s"
        rows.append(row(what, tflops * 1e12 / peak, theirs * 1e12 / peak, None, ">= 0.45"))
    for name, other in variants.items():
        if name != OURS:
            sizes = (mine["peak_bytes"] / 1e9, other["peak_bytes"] / 1e9)
            rows.append(row(f"peak GB / {name}", *sizes, None, ""))
            micro = (mine["micro_batch_size"], other["micro_batch_size"])
            rows.append(row(f"microbatch / {name}", *micro, None, ""))
    return rows


def report(found: dict) -> str:
    """Return the numbers as Markdown."""
    shape, where = found["shape"], found["machine"]
    about = ", ".join(f"{name} {value}" for name, value in where.items())
    lines = [
        f"# Training on {where['device']}, {found['when']}",
        "",
        f"{shape['parameters']:,} weights ({shape['layers']} layers of {shape['hidden']}), "
        f"sequence {shape['sequence']:,}; bf16 with fp32 masters; medians over turns. {about}.",
        "",
        format_table(rows_of(found)),
        "",
        f"Where a step of {OURS} spends its time:",
        "",
        "| ms | share | calls | kernel |",
        "|---|---|---|---|",
    ]
    for row in found["kernels"]:
        kernel = row["kernel"].replace("|", "/")[:90]
        lines.append(f"| {row['ms']:.3f} | {row['share']:.1%} | {row['calls']:g} | `{kernel}` |")
    return "\n".join(lines) + "\n"


def save(found: dict, folder: Path) -> Path:
    """Write the numbers as JSON and Markdown; return the latter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    device = "-".join(found["machine"]["device"].split()).lower()
    path = folder / f"gpu_train-{device}-{found['when'][:10]}.md"
    path.write_text(report(found), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Measure from the command line, or be one of the workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-share", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does everything run?")
    parser.add_argument("--compiled", action="store_true", help="torch.compile for the peer too")
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="microbatches to try")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="timed steps in a turn")
    parser.add_argument("--output", default="bench_results", help="folder for the report")
    options = parser.parse_args()
    options.sizes = options.sizes or ([1, 2] if options.smoke else [2, 4, 8, 16])
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_train: torch sees no GPU here: nothing is measured")
        return
    if options.worker:
        work(options)
        return
    found = measure(options)
    print(report(found))
    print(f"gpu_train: written to {save(found, Path(options.output))}")


if __name__ == "__main__":
    main()
