# SPDX-License-Identifier: Apache-2.0
"""A server that torchrun launches on two tensor parallel ranks, administered over HTTP."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from megatron.core.inference import SamplingParams
from megatron.inference import LLM, Inference, TextParams
from tests.functional_tests.torchrun_job import torchrun
from tests.support.gpt_checkpoint import make_model, save

KEY = "of-administration"
PROMPT, NEW = "Once upon", 24
LONG = {"prompt": "a", "max_tokens": 2900, "temperature": 0, "ignore_eos": True}

Posts = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one model with two sets of weights."""
    root = tmp_path_factory.mktemp("served")
    return [save(root / str(seed), make_model(seed), length=3000) for seed in (0, 1)]


def single_process_text(folder: Path) -> str:
    params = TextParams(max_new_tokens=NEW, sampling=SamplingParams(temperature=0.0))
    with LLM.open(str(folder), inference=Inference(), device="cpu") as llm:
        return "".join(delta.text for delta in llm.stream([PROMPT], params))


def address(job: subprocess.Popen[str], name: str) -> str:
    """Read a job's output up to the line with the URL of `name`."""
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line)
        if match := re.search(rf"serving {name} at (http://\S+)", line):
            return match[1]
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def server(
    folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Posts, Posts, Callable[[], dict[str, Any]]]]:
    """Yield functions that post to the client routes and the admin routes, and get the health."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(KEY)
    words = ["--load", str(folders[0]), "--device", "cpu", "--tensor-model-parallel-size", "2"]
    words += ["--port", "0", "--admin-port", "0", "--admin-key-file", str(key)]
    job = torchrun(words, processes=2, module="megatron.inference.serve")
    try:
        urls = [address(job, name) for name in (r"\S*iter_\S+", "administration")]
        with (
            httpx.Client(base_url=urls[0], timeout=60, trust_env=False) as clients,
            httpx.Client(base_url=urls[1], timeout=60, trust_env=False) as admin,
        ):
            admin.headers["authorization"] = f"Bearer {KEY}"
            yield (
                lambda path, **fields: clients.post(path, json=fields),
                lambda path, **fields: admin.post(path, json=fields),
                lambda: clients.get("/health").json(),
            )
        job.send_signal(signal.SIGTERM)
        text = job.communicate(timeout=60)[0]
        assert "served " in text  # rank 0 has drained and printed its summary
        assert KEY not in text
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


@pytest.mark.slow(seconds=30)
def test_torchrun_server_handles_admin_requests(
    folders: list[Path], server: tuple[Posts, Posts, Callable[[], dict[str, Any]]]
) -> None:
    post, administer, health = server
    request = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0}

    def answer() -> dict[str, Any]:
        response = post("/v1/completions", **request)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def administer_ok(path: str, **fields: Any) -> dict[str, Any]:
        response = administer(path, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    texts = [single_process_text(folder) for folder in folders]
    assert texts[0] != texts[1]
    assert answer()["text"] == texts[0]
    engine = health()["engine"]
    assert (engine["tensor_parallel"], engine["data_parallel"]) == (2, 1)
    assert administer_ok("/pause", mode="recompute")["paused"]
    assert health()["paused"]
    assert not administer_ok("/resume")["paused"]
    assert administer("/profile").status_code == 409
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, "/v1/completions", **LONG)
        while not health()["active"]:
            pass
        profile = administer_ok("/profile", steps=3)
        assert profile["steps"] == 3
        assert any(row["calls"] and "mm" in row["name"] for row in profile["operations"])
        administer_ok("/pause", mode="abort")
        (choice,) = running.result().json()["choices"]
        assert choice["finish_reason"] == "abort"
        administer_ok("/resume")
    assert administer_ok("/sleep")["asleep"]
    assert post("/v1/completions", **request).status_code == 503
    assert not administer_ok("/wake")["asleep"]
    assert answer()["text"] == texts[0]
    refusal = administer("/weights", load="/nowhere")
    assert refusal.status_code == 409
    assert "/nowhere" in refusal.json()["error"]["message"]
    assert answer()["weight_epochs"] == [0] * NEW
    assert administer_ok("/weights", load=str(folders[1]))["weight_epoch"] == 1
    after = answer()
    assert after["text"] == texts[1]
    assert after["weight_epochs"] == [1] * NEW
