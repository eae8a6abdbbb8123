# SPDX-License-Identifier: Apache-2.0
"""Training steps on one GPU that take turns: a process each, with the same share of the memory.

A worker tries the microbatch sizes that it is given until memory is full or a larger one gains
nothing, keeps its best, and gives back what a step no longer needs after each turn (`turns.py`).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from tools.bench.gpu_bench import Bench
from tools.bench.gpu_rows import Peer
from tools.bench.turns import Step, Variant, serve, take_turns

#: Builds the step of a variant with a microbatch size.
Build = Callable[[str, int, torch.device], Step]
#: A larger microbatch is kept if it is faster by this factor.
WORTHWHILE = 1.01
PROFILE_ROWS = 25
#: Of the device's memory, what an idle variant may keep: weights, gradients, optimizer state.
IDLE_SHARE = 0.2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command lines of training benches share."""
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--memory-share", type=float, default=1.0, help=argparse.SUPPRESS)
    # One size is kept without a trial: at most two starts of a variant fit into a suite's minutes.
    parser.add_argument("--sizes", type=int, nargs="+", default=[4], help="microbatches to try")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="timed steps in a turn")


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        sizes: ascending; a single one is not tried.
        rate: builds, measures and frees a step of that size; returns tokens per second.
        say: told what was found.

    Raises:
        ValueError: not even the first size fits.
    """
    if len(sizes) == 1:
        return sizes[0]
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


def work(
    options: argparse.Namespace,
    build: Build,
    *,
    sequence: int,
    facts: Callable[[], dict] = dict,
) -> None:
    """Be a worker: choose a microbatch, then train as asked.

    Args:
        options: of the command line.
        build: of the step.
        sequence: tokens of a row.
        facts: what else to answer after each turn.
    """
    device = torch.device("cpu" if options.rehearse else "cuda")
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.memory_share)

    def rate(size: int) -> float:
        step = None
        try:
            step = build(options.worker, size, device)
            return size * sequence / seconds_of(step, device)
        finally:
            del step
            free(device)

    known: dict = {}

    def start() -> Step:
        say = lambda text: print(f"bench: {options.worker}: {text}", file=sys.stderr)  # noqa: E731
        best = best_microbatch(options.sizes, rate, say=say)
        free(device)  # what a size that did not fit has left
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        known.update(micro_batch_size=best, step=build(options.worker, best, device))
        return known["step"]

    def answer() -> dict:
        if "kernels" not in known:  # behind the turn that warms up, which nobody times
            steps = 1 if options.rehearse else 2
            known["kernels"] = profile(known["step"], device, steps=steps)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        free(device)  # the others' turn
        told = {"micro_batch_size": known["micro_batch_size"], "kernels": known["kernels"]}
        return told | {"peak_device_bytes": peak} | facts()

    serve(start, answer)


def free(device: torch.device) -> None:
    """Give back the memory of a step that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def profile(step: Step, device: torch.device, *, steps: int) -> list[dict]:
    """Return the kernels (on a CPU: operators) that a step spends most of its time in."""
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


def race(options: argparse.Namespace, module: str, variants: Sequence[str]) -> dict[str, Variant]:
    """Let the variants take turns; the first is ours.

    Raises:
        ValueError: one of them could not run.
    """
    share = 1.0 - IDLE_SHARE * (len(variants) - 1)
    more = ["--sizes", *map(str, options.sizes), "--memory-share", str(share)]
    more += ["--rehearse"] if options.rehearse else []
    commands = {name: ["-m", module, "--worker", name, *more] for name in variants}
    rounds, steps = (1, 1) if options.rehearse else (options.rounds, options.steps)
    found = take_turns(commands, rounds=rounds, steps=steps, warmup=1 if options.rehearse else 2)
    for name in variants:
        if name not in found:
            raise ValueError(f"{name} did not run; its error is above")
    return found


def add_rows(
    bench: Bench,
    what: str,
    found: Mapping[str, Variant],
    *,
    sequence: int,
    flops_per_token: float,
    targets: Sequence[str],
    least_share: float | None = None,
) -> None:
    """Add the rows of a race: tokens/s, the share of the device's peak, memory.

    Args:
        bench: where to.
        what: the model.
        found: what each variant measured, ours first.
        sequence: tokens of a row.
        flops_per_token: operations of the model, not of the machine.
        targets: of tokens/s.
        least_share: of the peak on the data sheet, where one was promised.
    """
    from megatron.training.monitoring.flops import peak_flops

    by_round = {name: _rates(variant, sequence) for name, variant in found.items()}
    ours, *others = found
    rate = statistics.median(by_round[ours])
    peers = {
        name: Peer(
            figure=statistics.median(by_round[name]),
            ratio=statistics.median(
                a / b for a, b in zip(by_round[ours], by_round[name], strict=True)
            ),
        )
        for name in others
    }
    bound = bench.rates["bf16_flops"] / flops_per_token
    bench.add(
        f"{what}: {ours}",
        rate,
        unit="tokens/s",
        peers=peers,
        bound=bound,
        share=rate / bound,
        targets=targets,
    )
    peak = peak_flops(torch.cuda.get_device_name()) if bench.watch.on_gpu else None
    if peak is not None:
        bench.add(
            f"{what}: of {peak / 1e12:,.0f} TFLOP/s on the data sheet",
            rate * flops_per_token / peak,
            unit="MFU",
            targets=[] if least_share is None else [f"MFU >= {least_share}"],
        )
    sizes = {name: _gigabytes(variant) for name, variant in found.items()}
    memory = {name: Peer(figure=sizes[name], ratio=sizes[name] / sizes[ours]) for name in others}
    micro = ", ".join(f"{name} {v.facts['micro_batch_size']}" for name, v in found.items())
    bench.add(f"{what}: peak memory", sizes[ours], unit="GB", peers=memory, note=f"rows: {micro}")
    bench.kernels[f"a step of {what}, {ours},"] = found[ours].facts["kernels"]


def _rates(variant: Variant, sequence: int) -> list[float]:
    tokens = variant.facts["micro_batch_size"] * sequence
    return [tokens / statistics.median(steps) for steps in variant.rounds]


def _gigabytes(variant: Variant) -> float:
    return (variant.facts["peak_device_bytes"] or variant.peak_memory_bytes) / 1e9
