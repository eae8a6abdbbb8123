# SPDX-License-Identifier: Apache-2.0
"""Training steps on one GPU that take turns, ours with one peer at a time, a process each.

A worker takes the microbatch that the device's memory allows for, or half of it where that does not
fit. After each turn it gives back all memory but its weights, gradients and optimizer state, so
that the other worker has the rest (`turns.py`).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from tools.bench.harness import Bench
from tools.bench.table import Peer
from tools.bench.turns import Step, Variant, serve, take_turns

#: Builds the step of a variant with a microbatch size.
Build = Callable[[str, int, torch.device], Step]
PROFILE_ROWS = 25
#: The program of a worker.
WORKER = "tools.bench.gpu_train"
#: What a weight takes in an idle worker: bf16, fp32 master and gradient, two moments of Adam.
IDLE_BYTES_PER_WEIGHT = 18
#: What an idle worker holds besides: its CUDA context, kernels and workspaces.
CONTEXT_BYTES = 2 << 30
#: Microbatch by the least memory of the device in bytes, for a step of 1.3 B weights at 4,096
#: tokens: transformers takes 73.4 GB at 4 and 46.2 GB at 2, besides 24.1 GB of the idle worker.
MICROBATCHES = ((120e9, 4), (75e9, 2), (0.0, 1))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the common options of training benches."""
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--memory-share", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help="microbatch (default: by the memory)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="timed steps in a turn")


def microbatch_for(memory_bytes: float) -> int:
    """Return the microbatch of a 1.3 B model that fits a device, beside an idle worker."""
    return next(size for least, size in MICROBATCHES if memory_bytes >= least)


def memory_share(memory_bytes: float, weights: int) -> float:
    """Return the share of a device's memory that a worker may take beside an idle one.

    Args:
        memory_bytes: of the device.
        weights: of the model that the idle worker holds.
    """
    idle = IDLE_BYTES_PER_WEIGHT * weights + CONTEXT_BYTES
    return max(1.0 - idle / memory_bytes, 0.5)


def device_bytes() -> int:
    """Return the memory of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def largest_step(
    size: int, build: Callable[[int], Step], *, device: torch.device, say: Callable[[str], None]
) -> tuple[int, Step]:
    """Build the step of a microbatch, halving the microbatch until it fits the device.

    Args:
        size: first microbatch size.
        build: builds the step of a microbatch size.
        device: the device.
        say: called with a line for each size that does not fit.

    Returns:
        (microbatch size, its step), after two steps that allocate all memory.

    Raises:
        ValueError: a microbatch of 1 does not fit.
    """
    while size:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            step = build(size)
            for _ in range(2):  # optimizer state is allocated in the first
                step()
        except torch.OutOfMemoryError:
            say(f"microbatch {size}: out of memory" + (f"; takes {size // 2}" if size > 1 else ""))
        else:
            return size, step
        step = None
        free(device)
        size //= 2
    raise ValueError("a microbatch of 1 does not fit into this device's memory")


def work(
    options: argparse.Namespace,
    build: Build,
    *,
    facts: Callable[[], dict] = dict,
) -> None:
    """Run as a worker: choose a microbatch size, then train on request.

    Args:
        options: command line options.
        build: builds the step.
        facts: further values to report after each turn.
    """
    device = torch.device("cpu" if options.rehearse else "cuda")
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.memory_share)

    state: dict = {}

    def start() -> Step:
        size, step = largest_step(
            options.size,
            lambda rows: build(options.worker, rows, device),
            device=device,
            say=lambda text: print(f"bench: {options.worker}: {text}", file=sys.stderr),
        )
        state.update(micro_batch_size=size, step=step)
        return step

    def answer() -> dict:
        if "kernels" not in state:  # after the turn that warms up, which nobody times
            steps = 1 if options.rehearse else 2
            state["kernels"] = profile(state["step"], device, steps=steps)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        free(device)  # for the other worker's turn
        answers = {name: state[name] for name in ("micro_batch_size", "kernels")}
        return answers | {"peak_device_bytes": peak} | facts()

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
    rows = [
        {
            "kernel": event.key,
            "ms": (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
            / (1e3 * steps),
            "calls": event.count / steps,
        }
        for event in profiler.key_averages()
        if not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA
    ]
    whole = sum(row["ms"] for row in rows) or 1.0
    rows.sort(key=lambda row: -row["ms"])
    return [row | {"share": row["ms"] / whole} for row in rows[:PROFILE_ROWS]]


def race(
    bench: Bench,
    options: argparse.Namespace,
    variants: Sequence[str],
    *,
    weights: int,
) -> list[dict[str, Variant]]:
    """Race the local variant with each peer, one peer after the other.

    A peer that fails is a problem of the bench; its race contains only the local variant.

    Args:
        bench: takes the problems.
        options: command line options.
        variants: names, ours first.
        weights: number of weights, which an idle worker keeps in memory.

    Returns:
        The measurements of each race, ours first.

    Raises:
        ValueError: the local variant did not run.
    """
    size, share = options.size or 1, 1.0
    if not options.rehearse:
        size = options.size or microbatch_for(device_bytes())
        share = memory_share(device_bytes(), weights)
    extra_arguments = ["--model", options.model, "--size", str(size)]
    extra_arguments += ["--memory-share", str(share)]
    extra_arguments += ["--rehearse"] if options.rehearse else []
    rounds, steps = (1, 1) if options.rehearse else (options.rounds, options.steps)
    mcore, *peers = variants
    races = []
    for peer in peers:
        commands = {
            name: ["-m", WORKER, "--worker", name, *extra_arguments] for name in (mcore, peer)
        }
        # Each turn begins with a step in which the device's memory is allocated again.
        race = take_turns(commands, rounds=rounds, steps=steps, warmup=1, untimed=1)
        if mcore not in race:
            raise ValueError(f"{mcore} did not run beside {peer}; its error is above")
        if peer not in race:
            bench.problems[peer] = "did not run; its error is above"
        races.append(race)
    return races


def add_rows(
    bench: Bench,
    what: str,
    races: Sequence[Mapping[str, Variant]],
    *,
    sequence: int,
    flops_per_token: float,
    targets: Sequence[str],
    least_share: float | None = None,
) -> None:
    """Add the rows of races with one peer each: tokens/s, the share of the device's peak, memory.

    Args:
        bench: the bench that takes the rows.
        what: the model.
        races: measurements of each race, ours first.
        sequence: tokens of a row.
        flops_per_token: operations of the model, without recomputation.
        targets: targets for tokens/s.
        least_share: target share of the data sheet's peak, if any.
    """
    from megatron.training.monitoring.flops import peak_flops

    mcore = next(iter(races[0]))
    rate = statistics.median(_rates(races[0][mcore], sequence))
    size = _gigabytes(races[0][mcore])
    rows, memory = {}, {}
    micro = [f"{mcore} {races[0][mcore].facts['micro_batch_size']}"]
    for race in races:
        for name, variant in list(race.items())[1:]:
            mcore_rates, peer_rates = _rates(race[mcore], sequence), _rates(variant, sequence)
            ratio = statistics.median(a / b for a, b in zip(mcore_rates, peer_rates, strict=True))
            rows[name] = Peer(figure=statistics.median(peer_rates), ratio=ratio)
            memory[name] = Peer(figure=_gigabytes(variant), ratio=_gigabytes(variant) / size)
            micro.append(f"{name} {variant.facts['micro_batch_size']}")
    bound = bench.rates["matmul_flops"] / flops_per_token
    bench.add(
        f"{what}: {mcore}",
        rate,
        unit="tokens/s",
        peers=rows,
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
    note = f"rows: {', '.join(micro)}"
    bench.add(f"{what}: peak memory", size, unit="GB", peers=memory, note=note)
    bench.kernels[f"a step of {what}, {mcore},"] = races[0][mcore].facts["kernels"]


def _rates(variant: Variant, sequence: int) -> list[float]:
    tokens = variant.facts["micro_batch_size"] * sequence
    return [tokens / statistics.median(steps) for steps in variant.rounds]


def _gigabytes(variant: Variant) -> float:
    return (variant.facts["peak_device_bytes"] or variant.peak_memory_bytes) / 1e9
