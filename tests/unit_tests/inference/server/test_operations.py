# SPDX-License-Identifier: Apache-2.0
"""Operating a server: health, metrics and their dashboard, log lines, priorities."""

from __future__ import annotations

import concurrent.futures
import functools
import io
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.inference import EngineConfig
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.speculation import NGramLookup
from megatron.inference.server.middleware import LOG, JsonFormatter, LogLevel, set_up
from tests.support.http_server import Served, served, until

ROOT = Path(__file__).resolve().parents[4]
TEXT = {"prompt": "a", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    config = EngineConfig(num_blocks=64, max_num_seqs=1, num_speculative_tokens=2)
    with served(engine=config, features=EngineFeatures(proposer=NGramLookup())) as running:
        yield running


def test_health_reports_the_engine(server: Served) -> None:
    until(lambda: server.http.get("/health").status_code == 200)
    health = server.http.get("/health").json()
    assert health["live"]
    assert health["ready"]
    assert 0 <= health["heartbeat_seconds"] < 60
    assert health["engine"]["cache_blocks"] == 64
    assert health["engine"]["max_requests"] == 1
    assert health["engine"]["drafts_of_a_step"] == 2


@pytest.mark.parametrize("level", ["info", "warning"])
def test_log_level_decides_on_the_line_per_response(
    level: LogLevel, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(functools.partial(LOG.setLevel, LOG.level))
    set_up("text", level)
    with served() as server:
        server.post("/v1/completions", **TEXT)
    LOG.warning("the server is slow")
    assert any("answered 200" in line for line in caplog.messages) == (level == "info")
    assert "the server is slow" in caplog.messages


def test_accepted_drafts_are_counted(server: Served) -> None:
    text = server.post("/v1/completions", **{**TEXT, "prompt": "abcabcab", "max_tokens": 9})
    assert text.json()["choices"][0]["text"] == "cdefghijk"
    server.post("/v1/completions", **{**TEXT, "prompt": "abcdefabc", "max_tokens": 6})
    values, stats = server.metrics(), server.engine.stats
    assert values["megatron:spec_decode_num_draft_tokens_total"] == stats.drafted > 0
    assert values["megatron:spec_decode_num_accepted_tokens_total"] == stats.accepted > 0
    assert stats.accepted < stats.drafted
    assert values["megatron:weight_epoch"] == 0


def test_dashboard_queries_exactly_the_exported_metrics(server: Served) -> None:
    server.post("/v1/completions", **TEXT)
    served_names = {name.split("{")[0] for name in server.metrics()}
    dashboard = json.loads((ROOT / "docs/grafana_serving.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queried = {name for query in queries for name in re.findall(r"megatron:\w+", query)}
    assert queried <= served_names
    # The dashboard shows every exported metric.
    assert {n for n in served_names if not re.search(r"_(created|sum|count)$", n)} <= queried


def test_waiting_requests_run_by_priority(server: Served) -> None:
    priorities = []  # of each step
    gate, scheduler = server.model.gate, server.engine.scheduler
    all_received = threading.Event()

    def before() -> None:
        priorities.append(scheduler.running[0].priority)
        if not all_received.is_set():
            gate.clear()  # each `set` below allows one step, which receives the sent requests

    gate.clear()
    server.model.before = before
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = pool.submit(server.post, "/v1/completions", **TEXT | {"max_tokens": 60})
        until(lambda: scheduler.running)
        posted = []
        for count, priority in enumerate((3, None, -2), 1):
            fields = {} if priority is None else {"priority": priority}
            posted.append(pool.submit(server.post, "/v1/completions", **TEXT, **fields))
            until(lambda count=count: server.http.get("/health").json()["active"] == 1 + count)
        while len(scheduler.waiting) < 3:
            assert not running.done()
            gate.set()
            time.sleep(0.05)
        all_received.set()
        gate.set()
        assert [p.result().status_code for p in (running, *posted)] == [200] * 4
    server.model.before = lambda: None
    assert [priority for priority, _ in itertools.groupby(priorities)] == [0, -2, 0, 3]


def test_json_log_lines_contain_the_request_id(server: Served) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        ids = [
            server.http.get(path).headers["x-request-id"]
            for path in ("/v1/models", "/no%0Awhere", "/health")
        ]
        until(lambda: out.getvalue().count("\n") == 2)
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(logging.NOTSET)
    models, nowhere = map(json.loads, out.getvalue().splitlines())  # /health is not logged
    assert [models["request_id"], nowhere["request_id"]] == ids[:2]
    assert (models["method"], models["path"], models["status"]) == ("GET", "/v1/models", 200)
    assert (nowhere["path"], nowhere["status"]) == ("/no\nwhere", 404)
    assert 0 < models["seconds"] < 60
