# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the server: names as in vLLM, under the prefix `megatron:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

#: Most names of ignored fields with a counter of their own; clients choose the names.
MAX_IGNORED_NAMES = 100

_GAUGES = {
    "running": ("num_requests_running", "Outputs that the engine is generating."),
    "waiting": ("num_requests_waiting", "Outputs that wait for admission."),
    "cache_usage": ("kv_cache_usage_perc", "Fraction of cache blocks in use, 0 to 1."),
    "epoch": ("weight_epoch", "Number of weight updates so far."),
}
_COUNTERS = {
    "prefix_queried": (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_hit": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preempted": ("num_preemptions", "Preempted sequences."),
    "steps": ("engine_steps", "Engine steps."),
    "drafted": ("spec_decode_num_draft_tokens", "Draft tokens verified by the engine."),
    "accepted": ("spec_decode_num_accepted_tokens", "Accepted draft tokens."),
    "forced": (
        "grammar_forced_tokens",
        "Tokens forced by a grammar, which took no step of their own.",
    ),
}


class _EngineStats:
    """Collector of the engine's statistics, read at each scrape."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats
        self.lookups = {"prefix_queried": 0, "prefix_hit": 0}

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics."""
        stats = {**self._stats(), **self.lookups}
        for key, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"megatron:{name}", text, value=stats.get(key, 0))
        for key, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"megatron:{name}", text, value=stats.get(key, 0))


class ServerMetrics:
    """Counters and histograms of one server.

    Args:
        stats: returns the last statistics of the engine.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        self._engine_stats = _EngineStats(stats)
        self._registry.register(self._engine_stats)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(
                f"megatron:{name}_seconds", text, buckets=_SECONDS, registry=self._registry
            )

        self.time_to_first_token = histogram(
            "time_to_first_token", "Time to the first token of an output, in seconds."
        )
        self.inter_token = histogram(
            "inter_token_latency", "Time between the tokens of an output, in seconds."
        )
        self._request_latency = histogram(
            "e2e_request_latency", "Time to the end of an output, in seconds."
        )
        self._tokens = Counter(
            "megatron:generation_tokens", "Tokens generated.", registry=self._registry
        )
        self._prompt_tokens = Counter(
            "megatron:prompt_tokens", "Prompt tokens.", registry=self._registry
        )
        self._ends = Counter(
            "megatron:request_success",
            "Finished outputs, by reason.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._ignored = Counter(
            "megatron:ignored_fields",
            "Requests with an ignored field, by field.",
            ["field"],
            registry=self._registry,
        )
        self._ignored_names: set[str] = set()
        self._answers = Counter(
            "megatron:http_responses",
            "HTTP responses, by status.",
            ["status"],
            registry=self._registry,
        )

    def note_prompts(self, tokens: int) -> None:
        """Count tokens of admitted prompts."""
        self._prompt_tokens.inc(tokens)

    def note_lookup(self, queried: int, hit: int) -> None:
        """Count prompt tokens that were looked up in the prefix cache, and those found."""
        lookups = self._engine_stats.lookups
        lookups["prefix_queried"] += queried
        lookups["prefix_hit"] += hit

    def note_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._tokens.inc(count)

    def note_end(self, reason: str, seconds: float) -> None:
        """Count a finished output and its latency."""
        self._ends.labels(reason).inc()
        self._request_latency.observe(seconds)

    def note_answer(self, status: int) -> None:
        """Count an HTTP answer."""
        self._answers.labels(str(status)).inc()

    def note_ignored(self, fields: Sequence[str]) -> list[str]:
        """Count the ignored fields of a request; return the fields that are new.

        After `MAX_IGNORED_NAMES` fields, new fields are counted together as `other`.
        """
        new_names = []
        for name in fields:
            if name not in self._ignored_names:
                if len(self._ignored_names) == MAX_IGNORED_NAMES:
                    name = "other"
                else:
                    self._ignored_names.add(name)
                    new_names.append(name)
            self._ignored.labels(name).inc()
        return new_names

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
