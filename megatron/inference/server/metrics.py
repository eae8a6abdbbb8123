# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the server: names as in vLLM, under the prefix `megatron:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

_GAUGES = {
    "running": ("num_requests_running", "Outputs that the engine computes."),
    "waiting": ("num_requests_waiting", "Outputs that wait for the engine."),
    "cache_usage": ("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1."),
    "epoch": ("weight_epoch", "How often the weights have been replaced."),
}
_COUNTERS = {
    "prefix_queried": (
        "prefix_cache_queries",
        "Tokens of prompts that were looked up in the prefix cache.",
    ),
    "prefix_hit": ("prefix_cache_hits", "Of these tokens, found there."),
    "preempted": ("num_preemptions", "Rows that gave up their blocks."),
    "steps": ("engine_steps", "Steps of the engine."),
    "drafted": ("spec_decode_num_draft_tokens", "Drafts that the engine verified."),
    "accepted": ("spec_decode_num_accepted_tokens", "Drafts that were accepted."),
    "forced": ("grammar_forced_tokens", "Tokens of grammars that took no step of their own."),
}


class _EngineStats:
    """Collector of the engine's statistics, read at each scrape."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics."""
        stats = self._stats()
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
        self._registry.register(_EngineStats(stats))

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"megatron:{name}_seconds", text, buckets=_SECONDS, registry=self._registry
            )

        self.time_to_first_token = seconds("time_to_first_token", "To an output's first token.")
        self.inter_token = seconds("inter_token_latency", "Between the tokens of an output.")
        self._whole = seconds("e2e_request_latency", "To an output's end.")
        self._tokens = Counter(
            "megatron:generation_tokens", "Tokens generated.", registry=self._registry
        )
        self._prompt_tokens = Counter(
            "megatron:prompt_tokens", "Tokens of prompts.", registry=self._registry
        )
        self._ends = Counter(
            "megatron:request_success",
            "Outputs that have ended, by reason.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._answers = Counter(
            "megatron:http_responses",
            "HTTP answers, by status.",
            ["status"],
            registry=self._registry,
        )

    def note_prompts(self, tokens: int) -> None:
        """Count tokens of admitted prompts."""
        self._prompt_tokens.inc(tokens)

    def note_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._tokens.inc(count)

    def note_end(self, reason: str, seconds: float) -> None:
        """Count a finished output and its latency."""
        self._ends.labels(reason).inc()
        self._whole.observe(seconds)

    def note_answer(self, status: int) -> None:
        """Count an HTTP answer."""
        self._answers.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
