# SPDX-License-Identifier: Apache-2.0
"""Programs whose log cannot grow: stderr on a full disk, or a file size limit."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.functional_tests.small_run import flags, write_tokens
from tests.support.gpt_checkpoint import make_model, save


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder, make_model())
    return folder


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def started(module: str, words: list[str], log: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start a program with stdout to a pipe and stderr to a full log."""
    path = "/dev/full" if log == "full" else tmp_path / "log"
    with open(path, "ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=None if log == "full" else limit_file_size,
        )


def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def answers(url: str, job: subprocess.Popen[bytes]) -> list[Any]:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while job.poll() is None:
            try:
                if client.get("/health").json()["ready"]:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        fields = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        return [client.post("/v1/completions", json=fields).status_code for _ in range(3)]


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("log", ["full", "limited"])
def test_server_with_full_log_starts_answers_and_drains(root, tmp_path, log):
    number = port()
    words = ["--load", str(root), "--device", "cpu", "--port", str(number)]
    job = started("megatron.inference.serve", words, log, tmp_path)
    try:
        assert answers(f"http://127.0.0.1:{number}", job) == [200] * 3
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            job.kill()
            job.communicate()
    assert job.returncode == 0


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("log", ["full", "limited"])
def test_generation_and_training_succeed_with_full_log(root, tmp_path, log):
    words = ["--load", str(root), "--device", "cpu", "--prompt", "Once", "--max-new-tokens", "3"]
    job = started("megatron.inference.generate", words, log, tmp_path)
    out = job.communicate(timeout=120)[0]
    assert (job.returncode, out[:4]) == (0, b"Once")
    argv = flags(
        write_tokens(tmp_path / "tokens"), "--train-iters 2 --eval-interval 0 --lr-warmup-iters 0"
    )
    job = started("megatron.training.pretrain_gpt", argv, log, tmp_path)
    out = job.communicate(timeout=120)[0].decode()
    assert job.returncode == 0, out
    assert "iteration        2/       2" in out
