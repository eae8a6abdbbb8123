# SPDX-License-Identifier: Apache-2.0
"""Measure the inference engine: `python -m megatron.inference.bench --load DIR ...`.

Random requests of exact lengths run on a loaded model. All at once (closed loop), or as they arrive
at random times of a rate (open loop, a Poisson process). Repeats have the same requests and an
empty prefix cache, after some that are not counted.

| figure | meaning |
|---|---|
| tokens/s | generated tokens by the time from the first arrival to the last token |
| TTFT | time to first token, from a request's arrival |
| ITL | inter-token latency: the time between two tokens of a request |
| host | time of a step outside the model and sampling: planning and bookkeeping |
| hidden | share of steps whose plan was ready before the step before had ended |
| wasted | tokens of outputs that had ended when they were chosen |
| drafts | of speculative decoding: proposed, accepted, and new tokens of a row by its steps |
| replica | of each data-parallel replica: requests, and prompt tokens in its prefix cache |
| idle | share of the time that each pipeline stage has waited for others (its bubbles) |
| W | how many times more rows static batches of the same requests would compute |
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
from megatron.inference.config import BenchConfig, Load, start_facts

if TYPE_CHECKING:
    import torch

    from megatron.core.inference import Engine, Request
    from megatron.core.inference.router import Replicas
    from megatron.core.inference.scheduler import CacheStats
    from megatron.core.process_groups import Group

PROG = "python -m megatron.inference.bench"


@dataclass
class Repeat:
    """What one repeat took, in seconds.

    Args:
        seconds: from the first arrival to the last token.
        first: from the arrival of each request to its first token.
        between: between neighbouring tokens of a request.
        host: of each step outside the model and sampling.
        computed: tokens of each step.
        idle: of the whole, waiting for other pipeline stages.
        most_rows, most_blocks: at once.
    """

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    idle: float = 0.0
    most_rows: int = 0
    most_blocks: int = 0


def make_requests(load: Load, vocab_size: int) -> list[Request]:
    """Return the requests, each without a stop token."""
    from megatron.core.inference import Request, SamplingParams

    source = random.Random(load.seed)
    low, high = math.log(load.min_output_tokens), math.log(load.max_output_tokens)
    shared = source.choices(range(vocab_size), k=load.shared_prefix_tokens)
    unique = load.input_tokens - len(shared)
    return [
        Request(
            prompt=(*shared, *source.choices(range(vocab_size), k=unique)),
            max_new_tokens=round(math.exp(source.uniform(low, high))),
            sampling=SamplingParams(temperature=0),
            sequence=number,
        )
        for number in range(load.num_requests)
    ]


def arrivals(load: Load) -> list[float]:
    """Return when each request arrives, in seconds from the first."""
    if load.request_rate is None:
        return [0.0] * load.num_requests
    source, now, found = random.Random(load.seed + 1), 0.0, []
    for _ in range(load.num_requests):
        found.append(now)
        now += source.expovariate(load.request_rate)
    return found


def static_waste(lengths: Sequence[int], rows: int) -> float:
    """Return W: rows that static batches of `rows` compute, by those that are wanted."""
    batches = [lengths[n : n + rows] for n in range(0, len(lengths), rows)]
    return sum(len(batch) * max(batch) for batch in batches) / sum(lengths)


def time_of_rank_0(now: float, group: Group, device: torch.device) -> float:
    """Return the time of rank 0 on every rank of the group."""
    import torch

    from megatron.core.comm import all_reduce

    nanoseconds = int(1e9 * now) if group.rank == 0 else 0
    return all_reduce(torch.tensor([nanoseconds], device=device), group).item() / 1e9


def measure(
    replicas: Replicas,
    requests: Sequence[Request],
    times: Sequence[float],
    *,
    group: Group | None = None,
) -> Repeat:
    """Run the requests, each added when it arrives, and return what that took.

    Args:
        replicas: the engines of all ranks.
        requests, times: what arrives when, in seconds.
        group: of the ranks that have to add a request before the same step: they take the time of
            its rank 0. None where all requests are there at the start, or for one process.
    """
    engine, found = replicas.engine, Repeat()
    scheduler = engine.scheduler
    waiting = list(zip(times, requests, strict=True))
    arrived: dict[int, float] = {}
    newest: dict[int, tuple[int, float]] = {}  # tokens of each, and when they were there
    idle = engine.link.idle_seconds
    begin = time.perf_counter()
    while waiting or replicas.unfinished:
        now = time.perf_counter() - begin
        if group is not None:
            now = time_of_rank_0(now, group, engine.device)
        while waiting and waiting[0][0] <= now:
            at, request = waiting.pop(0)
            arrived[replicas.add(request)] = at
        if not replicas.unfinished:
            time.sleep(max(0.0, waiting[0][0] - now))
            continue
        computed, inside = engine.stats.computed, engine.model_seconds
        start = time.perf_counter()
        completions = replicas.step()
        end = time.perf_counter()
        found.host.append(end - start - (engine.model_seconds - inside))
        found.computed.append(engine.stats.computed - computed)
        blocks = scheduler.pool.num_blocks - scheduler.pool.available
        found.most_blocks = max(found.most_blocks, blocks)
        found.most_rows = max(found.most_rows, len(scheduler.running))
        for completion in completions:
            identity, count = completion.request_id, len(completion.tokens)
            if identity in newest:
                known, before = newest[identity]
                # The tokens of one step share its time.
                found.between += [(end - begin - before) / (count - known)] * (count - known)
            else:
                found.first.append(end - begin - arrived[identity])
            newest[identity] = count, end - begin
    found.seconds, found.idle = time.perf_counter() - begin, engine.link.idle_seconds - idle
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least `share` of all are at most (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def summary(
    repeats: Sequence[Repeat], replicas: Replicas, lengths: Sequence[int], *, rows: int
) -> dict[str, Any]:
    """Return the figures of all repeats: those of times over all of them, in milliseconds; of
    several replicas those of the first, and counts over all."""
    rates = [sum(lengths) / repeat.seconds for repeat in repeats]
    first = [t for repeat in repeats for t in repeat.first]
    between = [t for repeat in repeats for t in repeat.between]
    host = [t for repeat in repeats for t in repeat.host]
    computed = [n for repeat in repeats for n in repeat.computed]
    engine, every = replicas.engine, replicas.stats()
    stats = sum(every[1:], every[0])
    return {
        "requests": len(lengths),
        "output_tokens": sum(lengths),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_least": min(rates),
        "tokens_per_second_most": max(rates),
        "ttft_mean_ms": 1e3 * statistics.mean(first),
        "ttft_p50_ms": 1e3 * percentile(first, 0.5),
        "ttft_p99_ms": 1e3 * percentile(first, 0.99),
        "itl_p50_ms": 1e3 * percentile(between, 0.5),
        "itl_p99_ms": 1e3 * percentile(between, 0.99),
        "host_us_per_step": 1e6 * statistics.median(host),
        "computed_tokens_per_step": statistics.mean(computed),
        "steps": len(computed) // len(repeats),
        "cache_bytes": engine.cache.num_bytes,
        "most_rows": max(repeat.most_rows for repeat in repeats),
        "most_cached_tokens": engine.config.block_size
        * max(repeat.most_blocks for repeat in repeats),
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
        **replica_figures(replicas, every),
        **graph_figures(engine),
    }


def replica_figures(replicas: Replicas, stats: Sequence[CacheStats]) -> dict[str, Any]:
    """Return what each replica was sent and found in its prefix cache, in all repeats; nothing of a
    single one."""
    if replicas.router is None:
        return {}
    return {
        "replica_requests": ", ".join(f"{count:,}" for count in replicas.router.requests),
        "replica_prefix_hits": ", ".join(f"{one.hit:,}" for one in stats),
    }


def graph_figures(engine: Engine) -> dict[str, Any]:
    """Return what graphs did; steps of all repeats, those that are not counted too."""
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
    """Return the figures, one on a line."""
    shown = {
        k: v if isinstance(v, str) else f"{v:,.2f}" if isinstance(v, float) else f"{v:,}"
        for k, v in figures.items()
    }
    return "\n".join(f"{name:26} {value:>14}" for name, value in shown.items())


def run(config: BenchConfig, launch: Launch, reports: ErrorReports) -> None:
    """Load the model, measure, and have rank 0 print the table.

    Args:
        config: what to measure.
        launch: which rank this is.
        reports: agrees with the other ranks on errors.

    Raises:
        ValueError: anything the user can fix.
    """
    from megatron.inference.checkpoint_model import load_checkpoint_model
    from megatron.inference.llm import LLM

    load, rows = config.requests, config.inference.inference_max_requests
    with load_checkpoint_model(
        config.source,
        launch,
        speculation=config.speculation,
        facts=start_facts(config),
        reports=reports,
    ) as loaded:
        requests, times = make_requests(load, loaded.vocab_size), arrivals(load)
        lengths = [request.max_new_tokens for request in requests]
        longest = load.input_tokens + max(lengths)
        blocks = rows * -(-longest // config.inference.inference_block_size)
        replicas = LLM(loaded, config.inference, num_blocks=blocks).replicas
        engine = replicas.engine
        shares_clock = launch.world_size > 1 and load.request_rate is not None
        group = loaded.model.groups["world"] if shares_clock else None
        repeats = []
        for number in range(load.warmup + load.repeats):
            found = measure(replicas, requests, times, group=group)
            replicas.forget_cached()
            if number >= load.warmup:
                repeats.append(found)
        figures = summary(repeats, replicas, lengths, rows=rows)
        if engine.link.count > 1:
            share = statistics.median(repeat.idle / repeat.seconds for repeat in repeats)
            idle = engine.link.of_stages(share)
            figures["stage_idle_share"] = ", ".join(f"{share:.2f}" for share in idle)
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
        environment: of this process, where torchrun gives its rank.
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
