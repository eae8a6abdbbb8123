# SPDX-License-Identifier: Apache-2.0
"""The serve command from a checkpoint to answers and shutdown: one process, two ranks, options."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from megatron.cli.flags import parse_command_line
from megatron.inference import serve
from megatron.inference.serve import ServeConfig
from megatron.inference.server import http_process
from megatron.training.data.chat import CHATML
from tests.support.commands import refusal, run
from tests.support.gpt_checkpoint import make_model, save
from tests.support.hf_folders import write_pooling
from tests.support.launchers import serve_store
from tests.support.ranks import RankSet, start_ranks

# Broadcasting this request takes more than one collective.
LONG = [3 + n % 250 for n in range(2000)]
REQUESTS = ({"prompt": "Once", "seed": 5}, {"prompt": LONG, "temperature": 0})


def command_on_rank(rank: int, world: int, words: list[str], launcher: dict[str, str]) -> int:
    ranked = {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)} if launcher else {}
    return serve.main(words, ranked)


@contextlib.contextmanager
def started(root: Path, world: int, *extra_flags: str) -> Iterator[tuple[RankSet, httpx.Client]]:
    """Start the command on `world` ranks; yield the ranks and a client once the server is ready."""
    words = ["--load", str(root), "--device", "cpu", "--port", "0", *extra_flags]
    launcher: dict[str, str] = {}
    if world > 1:
        _store, launcher = serve_store(world)
    with start_ranks(command_on_rank, world, words, launcher, init=False) as ranks:
        ranks.wait_for_line(0, "serving", timeout=60)
        (url,) = re.findall(r"serving \S+ at (http://\S+)", ranks.log(0))
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield ranks, client


def answers(client: httpx.Client) -> list[str]:
    posted = [
        client.post("/v1/completions", json={"max_tokens": 8, **fields}) for fields in REQUESTS
    ]
    return [response.json()["choices"][0]["text"] for response in posted]


@pytest.mark.slow(seconds=35)
def test_two_ranks_answer_as_one_process_and_end_on_sigterm(tmp_path: Path) -> None:
    root, key = tmp_path / "checkpoints", tmp_path / "key"
    key.write_text("secret-key\n")
    flags = ("--api-key-file", str(key), "--served-model-name", "tiny", "--chat-template", "chatml")
    iteration = save(root, make_model(), length=3000)
    write_pooling(iteration, "Transformer", "Pooling", "Normalize", pooling_mode="mean")
    texts, vectors = [], []
    for world, sizes in ((1, ()), (2, ("--tensor-model-parallel-size", "2"))):
        with started(root, world, *flags, *sizes) as (ranks, client):
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer secret-key"
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            texts.append(answers(client))
            embedding_request = {"input": ["Once", "Once more"]}
            vectors.append(client.post("/v1/embeddings", json=embedding_request).json()["data"])
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200
            facts = client.get("/health").json()["engine"]
            assert facts["tensor_parallel"] * facts["data_parallel"] == world
            assert "megatron:num_requests_running 0.0" in client.get("/metrics").text
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                long = {"prompt": "a", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
                running = pool.submit(client.post, "/v1/completions", json=long)
                while not client.get("/health").json()["active"]:
                    pass
                for rank in range(world):
                    ranks.kill(rank, signal.SIGTERM)
                assert running.result().json()["usage"]["completion_tokens"] == 300
            assert ranks.values(timeout=60.0) == [0] * world
            assert "secret-key" not in ranks.log(0)
    assert texts[0] == texts[1]
    for reference, embedding in zip(*vectors, strict=True):
        assert embedding["embedding"] == pytest.approx(reference["embedding"], abs=1e-5)
    assert all(texts[0])


def http_process_with_a_full_log(rank: int, world: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    engine_socket, http_socket = socket.socketpair()
    engine_socket.close()  # the engine has ended before it sent settings
    listener = socket.create_server(("127.0.0.1", 0))
    sys.argv = ["http_process", str(http_socket.detach()), str(listener.detach())]
    http_process.main()
    print("a line that the full log drops", file=sys.stderr, flush=True)


def test_http_process_survives_a_full_log() -> None:
    with start_ranks(http_process_with_a_full_log, 1, init=False) as ranks:
        assert ranks.values(timeout=60.0) == [None]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--host 0.0.0.0", "--api-key-file"),
        ("--api-key-file /nowhere/key", "/nowhere/key"),
        ("--port 70000", "70000"),
        ("--max-queue -1", "--max-queue"),
        ("--tool-call-parser mine", "mine"),
        ("--tool-call-parser openai --reasoning-parser qwen3", "openai"),
        ("--chat-template-kwargs enable_thinking messages", "messages"),
        ("--max-body-mb 0", "--max-body-mb"),
        ("--inference-block-size 17", "17"),
        ("--max-colour 3", "--max-colour"),
    ],
)
def test_invalid_options_are_one_line_before_loading(words: str, text: str) -> None:
    assert text in refusal(run(serve.main, ["--load", "/nowhere", *words.split()]))


def test_answer_options_reach_the_http_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}{{ enable_thinking }}{{ thinking }}<arg_key>")
    words = f"--load x --chat-template {template} --tool-call-parser auto"
    words += " --reasoning-parser qwen3 --chat-template-kwargs enable_thinking thinking"
    words += " --served-model-name a b --strict-fields --log-level warning --allowed-origins *"
    words += " --response-store-mb 2.5"
    line = parse_command_line(ServeConfig, words.split(), prog="serve", description="")
    loaded: Any = SimpleNamespace(
        folder=tmp_path,
        chat_folder=None,
        tokenizer_choice={},
        vocab_size=3,
        max_length=4,
        stop_tokens=(),
        data_parallel=SimpleNamespace(size=3),
        model=SimpleNamespace(config=SimpleNamespace(num_labels=None)),
    )
    settings = serve.http_settings(loaded, line.config, [None, None])
    assert settings["client"]["max_outputs"] == 3 * 16 + 64
    assert settings["formats"] == {"tools": "glm45", "reasoning": "qwen3"}
    assert "--tool-call-parser glm45" in capsys.readouterr().err
    assert (settings["card"]["name"], settings["card"]["aliases"]) == ("a", ("b",))
    assert settings["strict_fields"]
    assert settings["response_store_bytes"] == 2_500_000
    assert (settings["log_level"], settings["allowed_origins"]) == ("warning", ["*"])
    assert "modules.json" in settings["no_embeddings"]
    assert settings["template_variables"] == ["enable_thinking", "thinking"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--tool-call-parser hermes", "--tool-call-parser hermes"),
        ("--chat-template-kwargs messages_x enable_thinking", "enable_thinking"),
        ("--reasoning-parser qwen3", None),
    ],
)
def test_options_unused_by_the_template_are_refused(words: str, error: str | None) -> None:
    words = f"--load x --chat-template chatml {words}"
    line = parse_command_line(ServeConfig, words.split(), prog="serve", description="")
    service = line.config.service
    if error is None:
        serve.check_template(service, CHATML, "the chat template chatml")
    else:
        with pytest.raises(ValueError, match=f"{error}.*chatml"):
            serve.check_template(service, CHATML, "the chat template chatml")


def test_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert port in refusal(run(serve.main, ["--load", "/nowhere", "--port", port]))


def test_missing_serve_extra_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name == "fastapi" else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    line = refusal(run(serve.main, ["--load", "/nowhere"]))
    assert "megatron-lm[serve]" in line
    assert "fastapi" in line
