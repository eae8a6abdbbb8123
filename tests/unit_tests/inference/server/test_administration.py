# SPDX-License-Identifier: Apache-2.0
"""Administration of a running server: pause, sleep, wake, profile, and weight updates."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import select
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.launch import Launch
from megatron.core.dist_checkpointing import TransferGroup, transfer, weight_chunks
from megatron.core.inference import EngineConfig
from megatron.core.models import GPTModel
from megatron.core.transformer import CacheShapes, MLPConfig
from megatron.inference import ModelSource
from megatron.inference.checkpoint_model import CheckpointModel
from megatron.inference.load_model import load_checkpoint_model
from megatron.inference.serve import Service, read_keys
from megatron.inference.server.app import ADMIN_ROUTES
from tests.support.commands import free_port
from tests.support.gpt_checkpoint import damage, make_model, save
from tests.support.http_server import ADMIN_KEY, NextByte, Served, served, until

LETTERS = {"prompt": "a", "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        admin_key=ADMIN_KEY, key="api-key", shapes=CacheShapes(attention=((1, 4),))
    ) as running:
        running.http.headers["authorization"] = "Bearer api-key"
        yield running


def post_and_pause(
    server: Served, pool: concurrent.futures.Executor, steps: int, **fields: Any
) -> Future:
    """Post a request and block the engine in a later step, which delays other messages."""
    step_numbers = iter(range(1 << 30))
    model = server.model

    def before() -> None:
        if next(step_numbers) == steps:
            model.gate.clear()
            model.gate.wait()

    model.before = before
    posted = pool.submit(server.post, "/v1/completions", **fields)
    until(lambda: not model.gate.is_set())
    return posted


def unblock(server: Served) -> None:
    """Unblock the engine once a control message waits to be read after the current step."""
    wait_for_control_message(server)
    server.model.before = lambda: None
    server.model.gate.set()


def wait_for_control_message(server: Served) -> None:
    """Wait until a control message has reached an engine blocked by `post_and_pause`."""
    until(lambda: select.select([server.link], [], [], 0)[0])


def administer(server: Served, action: str, **fields: Any) -> dict[str, Any]:
    """Return the answer to an administration request, which must succeed."""
    response = server.administer(action, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_every_admin_route_requires_its_own_key(server: Served) -> None:
    for method, path, *_ in ADMIN_ROUTES:
        assert method == "POST"
        assert server.administer(path[1:], key="api-key").status_code == 401
        assert server.post(path).status_code == 404  # not a client route
    assert not server.engine.paused


def test_administration_is_off_without_port_and_key(tmp_path: Path) -> None:
    api_key_file, admin_key_file = tmp_path / "one", tmp_path / "other"
    api_key_file.write_text("first")
    admin_key_file.write_text("second")
    assert read_keys(Service()) == (None, None)
    with pytest.raises(ValueError, match="--admin-key-file"):
        read_keys(Service(admin_port=0))
    with pytest.raises(ValueError, match=r"--admin-key-file.*--api-key-file"):
        read_keys(
            Service(admin_port=0, api_key_file=str(api_key_file), admin_key_file=str(api_key_file))
        )
    keys = read_keys(
        Service(admin_port=0, api_key_file=str(api_key_file), admin_key_file=str(admin_key_file))
    )
    assert keys == ("first", "second")


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_pause_changes_no_text(server: Served, mode: str) -> None:
    preempted = server.engine.stats.preempted
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = post_and_pause(server, pool, 5, **LETTERS)
        pausing = pool.submit(administer, server, "pause", mode=mode)
        unblock(server)
        assert pausing.result() == {"paused": True, "asleep": False, "weight_epoch": 0}
        steps = server.engine.stats.steps
        assert server.http.get("/health").json()["paused"]
        assert not running.done()
        assert server.engine.stats.steps == steps
        administer(server, "resume")
        assert running.result().json()["choices"][0]["text"] == "bcdefghijklmnopqrstu"
    assert server.engine.stats.preempted - preempted == (mode == "recompute")


def test_pause_with_abort_ends_all_outputs(server: Served) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = post_and_pause(server, pool, 5, **LETTERS)
        pausing = pool.submit(administer, server, "pause", mode="abort")
        unblock(server)
        assert pausing.result()["paused"]
        (choice,) = running.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert "bcdefghijklmnopqrstu".startswith(choice["text"])
    assert server.engine.unfinished == 0
    administer(server, "resume")


def test_sleeping_server_refuses_requests_until_woken(server: Served) -> None:
    full = server.engine.cache.num_bytes
    assert server.administer("wake").status_code == 409
    assert administer(server, "sleep")["asleep"]
    assert server.engine.cache.num_bytes == 0 < full
    assert server.post("/v1/completions", **LETTERS).status_code == 503
    assert server.http.get("/health").status_code == 503
    refusal = server.administer("resume")
    assert refusal.status_code == 409
    assert "wake" in refusal.json()["error"]["message"]
    assert administer(server, "wake") == {"paused": False, "asleep": False, "weight_epoch": 0}
    assert server.post("/v1/completions", **LETTERS).status_code == 200


def test_profile_without_requests_is_refused(server: Served) -> None:
    refusal = server.administer("profile", steps=4)
    assert refusal.status_code == 409
    assert "no request is running" in refusal.json()["error"]["message"]


# --- weights -------------------------------------------------------------------------------------

REQUEST: dict[str, Any] = {"prompt": "a" * 40, "max_tokens": 30, "temperature": 0, "logprobs": 0}
REQUEST |= {"ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return checkpoints: two of the same shape, a wider model, and a damaged file."""
    root = tmp_path_factory.mktemp("weights")
    paths = {"one": save(root / "one", make_model(0))}
    # Dropout affects training only.
    dropped = make_model(1, hidden_dropout=0.1).config.to_json()
    paths["two"] = save(root / "two", make_model(1), model=dropped)
    paths["wide"] = save(root / "wide", make_model(5, mlp=MLPConfig(ffn_hidden_size=64)))
    paths["damaged"] = root / "damaged" / paths["two"].name
    shutil.copytree(paths["two"], paths["damaged"])
    damage(paths["damaged"])
    return paths


class PausableModel(NextByte):
    """A real model whose steps can be blocked."""

    def __init__(self, loaded: CheckpointModel) -> None:
        super().__init__(loaded.model.cache_shapes)
        self.inner = loaded.generator(512)
        self.head, self.vocab_size = self.inner.head, self.inner.vocab_size

    def __call__(self, tokens: torch.Tensor, **context: Any) -> torch.Tensor:
        self.gate.wait()
        self.before()
        return self.inner(tokens, **context)

    def weights_replaced(self) -> None:
        self.inner.weights_replaced()


@pytest.fixture
def trained(folders: dict[str, Path]) -> Iterator[Served]:
    launch = Launch.from_environment({})
    with load_checkpoint_model(
        ModelSource(load=str(folders["one"]), device="cpu"), launch
    ) as loaded:
        config = EngineConfig(num_blocks=64)
        with served(
            PausableModel(loaded),
            engine=config,
            loaded=loaded,
            admin_key=ADMIN_KEY,
            vocab_size=loaded.vocab_size,
        ) as running:
            running.loaded = loaded
            yield running


def answer(server: Served) -> dict[str, Any]:
    return server.ok("/v1/completions", **REQUEST)


def logprobs(model: GPTModel, tokens: list[int], count: int) -> torch.Tensor:
    """Return the log-probabilities of the last `count` tokens by a full forward pass."""
    with torch.no_grad():
        logits = model.head.whole(model.head.project(model(torch.tensor([tokens]))))[:, 0]
    log_probs = logits.double().log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return log_probs[-count:, 0]


def test_new_weights_give_the_trainers_logprobs(trained: Served, folders: dict[str, Path]) -> None:
    before = answer(trained)
    assert answer(trained)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = post_and_pause(trained, pool, 9, **REQUEST)
        replacing = pool.submit(administer, trained, "weights", load=str(folders["two"]))
        unblock(trained)
        assert replacing.result()["weight_epoch"] == 1
        during = running.result().json()["choices"][0]
    # Every token has a weight epoch, and the running text continues.
    epochs = during["weight_epochs"]
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}
    assert len(epochs) == 30
    after = answer(trained)
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    (choice,) = after["choices"]
    assert choice["weight_epochs"] == [1] * 30
    assert choice["text"] != before["choices"][0]["text"]
    scores = choice["logprobs"]["token_logprobs"]
    ids = chosen_ids(trained)
    expected = logprobs(make_model(1), [97] * 40 + ids, 30)
    torch.testing.assert_close(torch.tensor(scores).double(), expected, rtol=0, atol=1e-5)
    wrong = logprobs(make_model(0), [97] * 40 + ids, 30)
    assert (torch.tensor(scores).double() - wrong).abs().max() > 0.1


def chosen_ids(server: Served) -> list[int]:
    """Return the ids that the engine chooses for `REQUEST`."""
    tokens = [97] * 40
    model = server.loaded.model
    for _ in range(30):
        with torch.no_grad():
            logits = model.head.whole(model.head.project(model(torch.tensor([tokens]))))[-1, 0]
        tokens.append(int(logits.argmax()))
    return tokens[40:]


def send(model: GPTModel, address: str) -> int:
    """Send a model's weights as the only rank of a training run; return the bytes sent."""
    group = TransferGroup(address=address, rank=0, senders=1, receivers=1)
    return group.send(weight_chunks(model.store))


def test_requests_are_answered_while_weights_are_awaited(trained: Served) -> None:
    address = f"127.0.0.1:{free_port()}"
    before = answer(trained)["choices"][0]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        replacing = pool.submit(administer, trained, "weights", address=address)
        until(lambda: trained.control.receiving)
        during = answer(trained)["choices"][0]
        assert (during["text"], set(during["weight_epochs"])) == (before["text"], {0})
        refusal = trained.administer("weights", address=address)
        assert refusal.status_code == 409
        assert "already in progress" in refusal.json()["error"]["message"]
        assert not replacing.done()
        sent = send(make_model(1), address)
        outcome = replacing.result()
        assert (outcome["weight_epoch"], outcome["received_bytes"]) == (1, sent)
        # Weights of another shape are refused and the old weights stay.
        weights = [tensor.clone() for tensor in trained.loaded.model.store.tensors()]
        refused = pool.submit(trained.administer, "weights", address=address)
        with contextlib.suppress(ValueError):  # the server's answer reports the refusal
            send(make_model(1, mlp=MLPConfig(ffn_hidden_size=64)), address)
        assert refused.result().status_code == 409
        assert "64" in refused.result().json()["error"]["message"]
        assert all(map(torch.equal, weights, trained.loaded.model.store.tensors()))
    after = answer(trained)["choices"][0]
    assert set(after["weight_epochs"]) == {1}
    assert after["text"] != before["text"]


def test_stream_continues_while_weights_are_received(
    trained: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, execute = f"127.0.0.1:{free_port()}", transfer._execute_transfers
    epochs: list[int] = []  # of the received tokens
    receiving, sending, sent = threading.Event(), threading.Event(), threading.Event()
    counts: list[tuple[int, int]] = []
    steps = itertools.count()

    def delayed_execute(group: Any, plan: Any, chunks: Any, rank: int) -> int:
        """Send weights only after the client has received five more tokens."""
        if rank:
            receiving.set()
        else:
            receiving.wait(20)
            num_before = len(epochs)
            sending.set()
            until(lambda: len(epochs) >= num_before + 5)
            counts.append((num_before, len(epochs)))
        return execute(group, plan, chunks, rank)

    def before() -> None:
        step = next(steps)
        if step == 20:  # steps 20 to 39 run while weights are received
            sending.wait(20)
        if step == 40:  # the next steps use the new weights
            sent.wait(20)
            until(lambda: trained.control.received is not None or not trained.control.receiving)

    def read() -> None:
        fields = {**REQUEST, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with trained.http.stream("POST", "/v1/completions", json=fields) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        epochs.extend(choice["weight_epochs"])

    monkeypatch.setattr(transfer, "_execute_transfers", delayed_execute)
    sender = make_model(1)
    trained.model.before = before
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        replacing = pool.submit(administer, trained, "weights", address=address)
        until(lambda: trained.control.receiving)
        reading = pool.submit(read)
        send(sender, address)
        sent.set()
        assert replacing.result()["weight_epoch"] == 1
        reading.result()
    ((num_before, num_after),) = counts
    assert num_after - num_before >= 5
    assert set(epochs[:num_after]) == {0}  # received between the request for weights and its end
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}
    assert len(epochs) == 60


def test_weights_without_a_sender_leave_the_old_weights(trained: Served) -> None:
    fields = {"address": f"127.0.0.1:{free_port()}", "timeout_seconds": 0.5}
    refusal = trained.administer("weights", **fields)
    assert refusal.status_code == 409
    message = refusal.json()["error"]["message"]
    assert fields["address"] in message
    assert "\n" not in message
    assert answer(trained)["choices"][0]["weight_epochs"] == [0] * 30
    assert trained.administer("weights", address="nowhere").status_code == 409


@pytest.mark.parametrize("kind", ["wide", "damaged", "nowhere"])
def test_mismatched_weights_leave_the_old_weights(
    trained: Served, folders: dict[str, Path], kind: str
) -> None:
    before = answer(trained)["choices"][0]["text"]
    old_weights = [tensor.clone() for tensor in trained.loaded.model.store.tensors()]
    refusal = trained.administer("weights", load=str(folders.get(kind, "/nowhere")))
    assert refusal.status_code == 409
    message = refusal.json()["error"]["message"]
    assert "\n" not in message
    assert kind in message
    assert all(map(torch.equal, old_weights, trained.loaded.model.store.tensors()))
    after = answer(trained)["choices"][0]
    assert after["text"] == before
    assert set(after["weight_epochs"]) == {0}
    assert not trained.engine.paused
