# SPDX-License-Identifier: Apache-2.0
"""What runs a server needs to see: health, metrics and their board, log lines, priorities."""

from __future__ import annotations

import concurrent.futures
import io
import itertools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.inference.engine import EngineConfig, EngineFeatures
from megatron.core.inference.speculation import NGramLookup
from megatron.inference.server.log_lines import LOG, JsonFormatter
from tests.support.http_server import Served, served, until

ROOT = Path(__file__).resolve().parents[4]
TEXT = {"prompt": "a", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    config = EngineConfig(num_blocks=64, max_num_seqs=1, num_speculative_tokens=2)
    with served(engine=config, features=EngineFeatures(proposer=NGramLookup())) as found:
        yield found


def metrics(server: Served) -> dict[str, float]:
    lines = server.http.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_health_explains_the_engine(server: Served) -> None:
    until(lambda: server.http.get("/health").status_code == 200)
    found = server.http.get("/health").json()
    assert found["live"]
    assert found["ready"]
    assert 0 <= found["heartbeat_seconds"] < 60
    assert found["engine"]["cache_blocks"] == 64
    assert found["engine"]["max_requests"] == 1
    assert found["engine"]["drafts_of_a_step"] == 2


def test_accepted_drafts_are_counted(server: Served) -> None:
    text = server.post("/v1/completions", **{**TEXT, "prompt": "abcabcab", "max_tokens": 9})
    assert text.json()["choices"][0]["text"] == "cdefghijk"
    server.post("/v1/completions", **{**TEXT, "prompt": "abcdefabc", "max_tokens": 6})
    found, stats = metrics(server), server.engine.stats
    assert found["megatron:spec_decode_num_draft_tokens_total"] == stats.drafted > 0
    assert found["megatron:spec_decode_num_accepted_tokens_total"] == stats.accepted > 0
    assert stats.accepted < stats.drafted
    assert found["megatron:weight_epoch"] == 0


def test_the_board_asks_only_for_metrics_that_exist(server: Served) -> None:
    server.post("/v1/completions", **TEXT)
    served_names = {name.split("{")[0] for name in metrics(server)}
    board = json.loads((ROOT / "docs/grafana_serving.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"megatron:\w+", query)}
    assert asked <= served_names
    # All that the engine says is on the board.
    assert {n for n in served_names if not re.search(r"_(created|sum|count)$", n)} <= asked


def test_requests_wait_by_their_priority(server: Served) -> None:
    served_first = []  # priorities, by step
    server.model.before = lambda: served_first.append(server.engine.scheduler.running[0].priority)
    server.model.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = pool.submit(server.post, "/v1/completions", **TEXT)
        until(lambda: server.engine.scheduler.running)
        posted = []
        for count, priority in enumerate((3, None, -2), 1):
            fields = {} if priority is None else {"priority": priority}
            posted.append(pool.submit(server.post, "/v1/completions", **TEXT, **fields))
            until(lambda count=count: server.http.get("/health").json()["active"] == 1 + count)
        server.model.gate.set()
        assert [p.result().status_code for p in (running, *posted)] == [200] * 4
    server.model.before = lambda: None
    assert [priority for priority, _ in itertools.groupby(served_first)] == [0, -2, 0, 3]
    bad = server.post("/v1/completions", **TEXT, priority=1 << 40)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "priority")


def test_json_lines_hold_the_requests_id(server: Served) -> None:
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
    models, nowhere = map(json.loads, out.getvalue().splitlines())  # no line of /health
    assert [models["request_id"], nowhere["request_id"]] == ids[:2]
    assert (models["method"], models["path"], models["status"]) == ("GET", "/v1/models", 200)
    assert (nowhere["path"], nowhere["status"]) == ("/no\nwhere", 404)
    assert 0 < models["seconds"] < 60
