# SPDX-License-Identifier: Apache-2.0
"""Measure the inference engine: `python -m megatron.inference.bench --load DIR ...`.

Random requests of exact lengths run on a loaded model. They arrive all at once (closed loop), or at
the random times of a Poisson process (open loop). After warm-up, every repeat runs the same
requests with an empty prefix cache.

| figure | meaning |
|---|---|
| tokens/s | generated tokens divided by the seconds from the first arrival to the last token |
| TTFT | time to first token, from a request's arrival |
| ITL | inter-token latency: the time between two tokens of a request |
| host | time of a step outside the model and sampling: planning and bookkeeping |
| hidden | share of steps that were planned before the previous step had ended |
| wasted | tokens that were sampled for outputs which had already ended |
| drafts | speculative decoding: tokens proposed, accepted, and generated per forward pass |
| replica | per data-parallel replica: requests, and prompt tokens found in the prefix cache |
| idle | share of its time that each pipeline stage waits for other stages (bubbles) |
| W | rows that static batching of the same requests computes, divided by the rows needed |
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.cli.error_reports import ErrorReports
from megatron.cli.errors import run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.launch import Launch
from megatron.cli.standard_streams import run_command
from megatron.core.untrusted_files import replace_file
from megatron.inference.config import Inference, ModelSource, Speculation, check, start_facts

if TYPE_CHECKING:
    import torch

    from megatron.core.inference import Engine, EngineRequest
    from megatron.core.inference.request_state import SchedulerStats
    from megatron.core.inference.router import Replicas
    from megatron.core.process_groups import Group

PROG = "python -m megatron.inference.bench"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of the measurement: random tokens of exact lengths."""

    num_requests: int = 64
    """Requests per repeat."""
    input_tokens: int = 32
    """Tokens of each prompt, including the shared prefix."""
    shared_prefix_tokens: int = 0
    """Tokens of a prefix that all prompts share; with the prefix cache it is computed once."""
    min_output_tokens: int = 8
    """Minimum number of tokens that a request generates; lengths are log-uniform."""
    max_output_tokens: int = 128
    """Maximum number of tokens that a request generates."""
    request_rate: float | None = None
    """Mean arrivals per second of a Poisson process (open loop); derived: all requests arrive at
    the start, and --inference-max-requests of them run at a time (closed loop)."""
    warmup: int = 1
    """Warm-up repeats, which are not measured."""
    repeats: int = 3
    """Measured repeats."""
    seed: int = 1234
    """Seed of tokens, lengths and arrivals; all repeats have the same requests."""
    output_json: str | None = None
    """File for all figures as JSON."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One measurement of the inference engine."""

    source: ModelSource
    requests: Load
    inference: Inference
    speculation: Speculation

    def __post_init__(self) -> None:
        check(self.source, self.inference, self.speculation)
        load = self.requests
        for name, value in (
            ("num-requests", load.num_requests),
            ("input-tokens", load.input_tokens),
            ("min-output-tokens", load.min_output_tokens),
            ("repeats", load.repeats),
            ("request-rate", load.request_rate),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"--{name} is {value}: it must be above 0")
        if load.max_output_tokens < load.min_output_tokens:
            raise ValueError(
                f"--max-output-tokens is {load.max_output_tokens}: it must be at least "
                f"--min-output-tokens {load.min_output_tokens}"
            )
        if not 0 <= load.shared_prefix_tokens < load.input_tokens:
            raise ValueError(
                f"--shared-prefix-tokens is {load.shared_prefix_tokens}: it must be at least "
                f"0 and below --input-tokens {load.input_tokens}"
            )
        tp = self.source.tensor_model_parallel_size
        stages = self.source.pipeline_model_parallel_size
        if load.request_rate is not None and stages > 1:
            raise ValueError(
                "--request-rate cannot be combined with --pipeline-model-parallel-size "
                f"{stages}, whose stages run different steps at the same time: drop one of "
                "the two options"
            )
        if load.request_rate is not None and self.inference.async_scheduling and tp > 1:
            raise ValueError(
                "--request-rate cannot be combined with --async-scheduling on several ranks: "
                "the ranks must agree on the time before each step, while a step is still "
                "running; drop one of the two options"
            )
        if load.warmup < 0:
            raise ValueError(f"--warmup is {load.warmup}: it must not be negative")


@dataclass
class Repeat:
    """Measurements of one repeat; times in seconds.

    Args:
        seconds: time from the first arrival to the last token.
        ttft: time to first token of each request, from its arrival.
        itl: inter-token latencies of all requests.
        host_seconds: time of each step outside the model and sampling.
        computed: number of tokens of each step.
        idle_seconds: time that this rank waits for other pipeline stages.
        max_rows, max_blocks: most rows and cache blocks in use at once.
    """

    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    idle_seconds: float = 0.0
    max_rows: int = 0
    max_blocks: int = 0


def make_requests(load: Load, vocab_size: int) -> list[EngineRequest]:
    """Return random requests without stop tokens."""
    from megatron.core.inference import EngineRequest, SamplingParams

    rng = random.Random(load.seed)
    low, high = math.log(load.min_output_tokens), math.log(load.max_output_tokens)
    shared = rng.choices(range(vocab_size), k=load.shared_prefix_tokens)
    unique = load.input_tokens - len(shared)
    return [
        EngineRequest(
            prompt=(*shared, *rng.choices(range(vocab_size), k=unique)),
            max_new_tokens=round(math.exp(rng.uniform(low, high))),
            sampling=SamplingParams(temperature=0),
            sequence=number,
        )
        for number in range(load.num_requests)
    ]


def arrival_times(load: Load) -> list[float]:
    """Return the arrival time of each request, in seconds after the first arrival."""
    if load.request_rate is None:
        return [0.0] * load.num_requests
    rng, now, times = random.Random(load.seed + 1), 0.0, []
    for _ in range(load.num_requests):
        times.append(now)
        now += rng.expovariate(load.request_rate)
    return times


def static_waste(lengths: Sequence[int], batch_size: int) -> float:
    """Return W: rows that static batches of `batch_size` compute, divided by the rows needed."""
    batches = [lengths[n : n + batch_size] for n in range(0, len(lengths), batch_size)]
    return sum(len(batch) * max(batch) for batch in batches) / sum(lengths)


def time_of_rank_0(now: float, group: Group, device: torch.device) -> float:
    """Return the clock of rank 0 on every rank of the group."""
    import torch

    from megatron.core.comm import all_reduce

    nanoseconds = int(1e9 * now) if group.rank == 0 else 0
    return all_reduce(torch.tensor([nanoseconds], device=device), group).item() / 1e9


def measure(
    replicas: Replicas,
    requests: Sequence[EngineRequest],
    times: Sequence[float],
    *,
    group: Group | None = None,
) -> Repeat:
    """Run the requests, each added at its arrival time, and return the measurements.

    Args:
        replicas: the engines of all ranks.
        requests: the requests.
        times: arrival time of each request, in seconds.
        group: ranks that have to add a request before the same step; they share the clock of its
            rank 0. None for one process, or if all requests arrive at the start.
    """
    engine, repeat = replicas.engine, Repeat()
    scheduler = engine.scheduler
    pending = list(zip(times, requests, strict=True))
    arrivals: dict[int, float] = {}  # request id -> arrival time
    token_times: dict[int, float] = {}  # request id -> time of its newest token
    idle_seconds = engine.link.idle_seconds
    begin = time.perf_counter()
    while pending or replicas.unfinished:
        now = time.perf_counter() - begin
        if group is not None:
            now = time_of_rank_0(now, group, engine.device)
        while pending and pending[0][0] <= now:
            arrival, request = pending.pop(0)
            arrivals[replicas.add(request)] = arrival
        if not replicas.unfinished:
            time.sleep(max(0.0, pending[0][0] - now))
            continue
        computed, model_seconds = engine.stats.computed, engine.runner.model_seconds
        start = time.perf_counter()
        deltas = replicas.step()
        end = time.perf_counter()
        repeat.host_seconds.append(end - start - (engine.runner.model_seconds - model_seconds))
        repeat.computed.append(engine.stats.computed - computed)
        blocks = scheduler.kv_cache.pool.num_blocks - scheduler.kv_cache.pool.available
        repeat.max_blocks = max(repeat.max_blocks, blocks)
        repeat.max_rows = max(repeat.max_rows, len(scheduler.running))
        for delta in deltas:
            request_id, num_tokens = delta.request_id, len(delta.tokens)
            if request_id in token_times:
                # The tokens of one step share its time.
                seconds = end - begin - token_times[request_id]
                repeat.itl += [seconds / num_tokens] * num_tokens
            else:
                repeat.ttft.append(end - begin - arrivals[request_id])
            token_times[request_id] = end - begin
    repeat.seconds, repeat.idle_seconds = (
        time.perf_counter() - begin,
        engine.link.idle_seconds - idle_seconds,
    )
    return repeat


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that is >= `fraction` of all values (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else 0.0


def summary(
    repeats: Sequence[Repeat], replicas: Replicas, lengths: Sequence[int], *, rows: int
) -> dict[str, Any]:
    """Return the figures of all repeats.

    Latencies are in milliseconds and pooled over the repeats. With several replicas, times are
    measured on the first replica and counts are summed over all.
    """
    rates = [sum(lengths) / repeat.seconds for repeat in repeats]
    ttft = [t for repeat in repeats for t in repeat.ttft]
    itl = [t for repeat in repeats for t in repeat.itl]
    host_seconds = [t for repeat in repeats for t in repeat.host_seconds]
    computed = [n for repeat in repeats for n in repeat.computed]
    engine, replica_stats = replicas.engine, replicas.stats()
    stats = sum(replica_stats[1:], replica_stats[0])
    return {
        "requests": len(lengths),
        "output_tokens": sum(lengths),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_least": min(rates),
        "tokens_per_second_most": max(rates),
        "ttft_mean_ms": 1e3 * statistics.mean(ttft),
        "ttft_p50_ms": 1e3 * percentile(ttft, 0.5),
        "ttft_p99_ms": 1e3 * percentile(ttft, 0.99),
        "itl_p50_ms": 1e3 * percentile(itl, 0.5),
        "itl_p99_ms": 1e3 * percentile(itl, 0.99),
        "host_us_per_step": 1e6 * statistics.median(host_seconds),
        "computed_tokens_per_step": statistics.mean(computed),
        "steps": len(computed) // len(repeats),
        "cache_bytes": engine.cache.num_bytes,
        "most_rows": max(repeat.max_rows for repeat in repeats),
        "most_cached_tokens": engine.config.block_size
        * max(repeat.max_blocks for repeat in repeats),
        "prefix_queried": stats.queried,
        "prefix_hit": stats.hit,
        "preempted": stats.preempted,
        "loop": "asynchronous" if engine.config.asynchronous else "synchronous",
        "planning_hidden": stats.overlapped / stats.steps,
        "wasted_tokens": stats.wasted,
        "drafts_proposed": stats.drafted,
        "drafts_accepted": stats.accepted,
        "tokens_per_forward": stats.tokens_per_forward,
        "static_batching_waste": static_waste(lengths, rows),
        **replica_figures(replicas, replica_stats),
        **graph_figures(engine),
    }


def replica_figures(replicas: Replicas, stats: Sequence[SchedulerStats]) -> dict[str, Any]:
    """Return requests and prefix-cache hits of each replica in all repeats; empty for one."""
    if replicas.router is None:
        return {}
    return {
        "replica_requests": ", ".join(f"{count:,}" for count in replicas.router.requests),
        "replica_prefix_hits": ", ".join(f"{replica.hit:,}" for replica in stats),
    }


def graph_figures(engine: Engine) -> dict[str, Any]:
    """Return the statistics of the graph recorder over all repeats, warm-up included."""
    graphs = engine.graphs
    if graphs is None:
        return {"graphs": "none"}
    return {
        "graphs": f"decode, {graphs.kind}",
        "graphs_captured": graphs.captured,
        "graph_capture_seconds": graphs.seconds,
        "graph_hits": graphs.replayed,
        "graph_eager_steps": graphs.eager,
        "graph_addresses_equal": graphs.compared,
        **({"graphs_refused": graphs.refused} if graphs.refused else {}),
    }


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures as text, one per line."""
    formatted = {
        k: v if isinstance(v, str) else f"{v:,.2f}" if isinstance(v, float) else f"{v:,}"
        for k, v in figures.items()
    }
    return "\n".join(f"{name:26} {value:>14}" for name, value in formatted.items())


def run(config: BenchConfig, launch: Launch, reports: ErrorReports) -> None:
    """Load the model, measure, and have rank 0 print the table.

    Args:
        config: options of the measurement.
        launch: rank and world size of this process.
        reports: agrees with the other ranks on errors.

    Raises:
        ValueError: anything the user can fix.
    """
    from megatron.inference.llm import LLM
    from megatron.inference.load_model import load_checkpoint_model

    load, max_requests = config.requests, config.inference.inference_max_requests
    with load_checkpoint_model(
        config.source,
        launch,
        speculation=config.speculation,
        facts=start_facts(config),
        reports=reports,
    ) as loaded:
        requests, times = make_requests(load, loaded.vocab_size), arrival_times(load)
        lengths = [request.max_new_tokens for request in requests]
        max_length = load.input_tokens + max(lengths)
        blocks = max_requests * -(-max_length // config.inference.inference_block_size)
        replicas = LLM(loaded, config.inference, num_blocks=blocks).replicas
        engine = replicas.engine
        shares_clock = launch.world_size > 1 and load.request_rate is not None
        group = loaded.model.groups["world"] if shares_clock else None
        repeats = []
        for number in range(load.warmup + load.repeats):
            timings = measure(replicas, requests, times, group=group)
            replicas.reset_prefix_cache()
            if number >= load.warmup:
                repeats.append(timings)
        figures = summary(repeats, replicas, lengths, rows=max_requests)
        if engine.link.count > 1:
            share = statistics.median(repeat.idle_seconds / repeat.seconds for repeat in repeats)
            stage_idle_shares = engine.link.all_gather_number(share)
            figures["stage_idle_share"] = ", ".join(f"{share:.2f}" for share in stage_idle_shares)
    if launch.rank == 0:
        print(table(figures))
        if load.output_json is not None:
            try:
                replace_file(load.output_json, json.dumps(figures, indent=1) + "\n")
            except OSError as error:
                raise ValueError(
                    f"--output-json {load.output_json} cannot be written: {error.strerror}"
                ) from None


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return this process's exit code.

    Args:
        argv: arguments without the program's name.
        environment: environment variables, in which torchrun passes the rank.
    """
    reports = ErrorReports(environment)

    def measured() -> None:
        line = parse_command_line(
            BenchConfig, argv, prog=PROG, description="Measure the inference engine."
        )
        run(line.config, Launch.from_environment(environment), reports)

    return run_entry_point(measured, prog=PROG, report=reports.report)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], os.environ))
