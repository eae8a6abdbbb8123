# SPDX-License-Identifier: Apache-2.0
"""The engine process on several ranks against a single-process engine: tokens, administration, and
the loss of a rank. The test talks to rank 0 as the HTTP process does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.flags import parse_command_line
from megatron.cli.launch import Launch
from megatron.cli.tokenizers import train_bpe
from megatron.core.dist_checkpointing import TransferGroup, weight_chunks
from megatron.core.inference import Completion, EngineRequest, OutputDelta, SamplingParams, generate
from megatron.core.models import GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.inference import LLM, Inference, ModelSource, serve
from megatron.inference.load_model import load_checkpoint_model
from megatron.inference.serve import ServeConfig
from megatron.inference.server.engine.link import FrameReader, frame, to_message
from tests.support.commands import free_port
from tests.support.gpt_checkpoint import make_model, save
from tests.support.hf_folders import make_classifier, save_folder, write_pooling
from tests.support.launchers import serve_store
from tests.support.ranks import start_ranks

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
#: Sequences that run at a time on each replica.
ROWS = 3
SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=5, logprobs=2))
LONG, TOO_LONG = 40, 90
WORDS = ["--device", "cpu", "--inference-max-requests", "3", "--inference-memory-gb", "0.0005"]


def engine_requests(first_id: int = 0, max_new_tokens: int = 24) -> list[EngineRequest]:
    """Return eight requests: two prefixes, greedy and sampled, the last with prompt logprobs."""
    requests = []
    for n in range(8):
        prefix = [3 + n % 2] * LONG
        requests.append(
            EngineRequest(
                request_id=first_id + n,
                prompt=(*prefix, *range(7, 8 + n)),
                max_new_tokens=max_new_tokens - n,
                sampling=SAMPLINGS[n // 2 % 2],
                sequence=n,
                prompt_logprobs=n == 7,
            )
        )
    return requests


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return checkpoints of a model with two sets of weights."""
    root = tmp_path_factory.mktemp("grids")
    paths = [save(root / str(seed), make_model(seed), length=TOO_LONG) for seed in (0, 1)]
    write_pooling(paths[0], "Transformer", "Pooling", "Normalize", pooling_mode="mean")
    return paths


def single_engine_outputs(folder: Path) -> list[Completion]:
    source = ModelSource(load=str(folder), device="cpu")
    with load_checkpoint_model(source, Launch.from_environment({})) as loaded:
        engine = LLM(loaded, Inference(inference_max_requests=ROWS)).engine
        return [completion for (completion,) in generate(engine, engine_requests())]


@pytest.fixture(scope="module")
def single_engine(folders: list[Path]) -> list[list[Completion]]:
    """Return a single-process engine's outputs of `engine_requests` for both sets of weights."""
    outputs = [single_engine_outputs(folder) for folder in folders]
    assert [completion.tokens for completion in outputs[0]] != [
        completion.tokens for completion in outputs[1]
    ]
    return outputs


class EngineLink:
    """The HTTP process's end of the link to rank 0, and the messages received."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._reader = link, FrameReader()
        self.outputs: dict[int, Completion] = {}
        self.ended: set[int] = set()
        self.replies: dict[int, Mapping[str, Any]] = {}  # refusals, embeddings and control results
        self.stats: list[Mapping[str, Any]] = []
        self.quiet = 0  # steps without output since the last output
        self.facts: Mapping[str, Any] = {}
        self._next_control_id = 1000

    def send(self, *messages: Mapping[str, Any]) -> None:
        self._link.sendall(b"".join(map(frame, messages)))

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        self.outputs |= {a.request_id: Completion() for a in requests}
        self.send(*({"kind": "add", "request": to_message(a)} for a in requests))

    def receive_until(self, condition: Callable[[], object]) -> None:
        """Receive messages until a condition holds."""
        while not condition():
            data = self._link.recv(1 << 20)
            assert data, "the engine process has ended"
            for message in self._reader.feed(data):
                self._handle(message)

    def _handle(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "facts":
            self.facts = message["facts"]
        elif message["kind"] in ("done", "refused"):
            self.replies[message["id"]] = message
        elif message["kind"] == "step":
            self.stats.append(message["stats"])
            self.quiet = 0 if message["deltas"] else self.quiet + 1
            for delta in map(OutputDelta.from_json, message["deltas"]):
                self.outputs[delta.request_id].add(delta)
                if delta.finish_reason:
                    self.ended.add(delta.request_id)

    def finished(self, requests: Sequence[EngineRequest]) -> list[Completion]:
        """Return the outputs once all requests have finished."""
        self.receive_until(lambda: all(a.request_id in self.ended for a in requests))
        return [self.outputs[a.request_id] for a in requests]

    def control(self, action: str, **fields: Any) -> Mapping[str, Any]:
        """Send a control message; return the answer."""
        number, self._next_control_id = self._next_control_id, self._next_control_id + 1
        self.send({"kind": "control", "id": number, "action": action, **fields})
        self.receive_until(lambda: number in self.replies)
        return self.replies[number]

    def start(self, requests: Sequence[EngineRequest], count: int) -> None:
        """Submit requests; wait until an output has `count` tokens while none has finished."""
        self.submit(requests)
        self.receive_until(
            lambda: any(len(self.outputs[a.request_id].tokens) >= count for a in requests)
        )
        assert not any(a.request_id in self.ended for a in requests)


Script = Callable[..., Any]


def serve_on_rank(
    rank: int, world: int, words: list[str], launcher: dict[str, str], script: Script, args: Any
) -> Any:
    """Run a rank's engine process; on rank 0, a thread runs `script` as the HTTP process."""
    line = parse_command_line(ServeConfig, words, prog="serve", description="")
    launch = Launch.from_environment({**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    keys = (None, None)
    if rank:
        serve.serve(line.config, launch, None, keys=keys, addresses=())
        return None
    engine_socket, http_socket = socket.socketpair()
    results: list[Any] = []

    def run_script() -> None:
        with http_socket:
            results.append(script(EngineLink(http_socket), *args))

    with engine_socket:
        thread = threading.Thread(target=run_script)
        thread.start()
        serve.serve(line.config, launch, engine_socket, keys=keys, addresses=())
        thread.join()
    return results[0]


def run(folder: Path, world: int, flags: str, script: Script, *args: Any, act: Any = None) -> Any:
    """Run a script against the engine process on `world` ranks; return its result.

    `act` is called while the ranks run.
    """
    _store, launcher = serve_store(world)
    words = ["--load", str(folder), *WORDS, *flags.split()]
    with start_ranks(serve_on_rank, world, words, launcher, script, args, init=False) as ranks:
        if act is not None:
            act()
        return ranks.values(timeout=90)[0]


def assert_same_outputs(actual: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert len(actual) == len(expected)
    for output, reference in zip(actual, expected, strict=True):
        assert output.tokens == reference.tokens, reference.index
        assert output.finish_reason == reference.finish_reason
        assert output.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
        tops = [
            [[token for token, _ in candidates] for candidates in c.top_logprobs]
            for c in (output, reference)
        ]
        assert tops[0] == tops[1]
        if reference.prompt_logprobs is not None:
            assert output.prompt_logprobs == pytest.approx(reference.prompt_logprobs, abs=1e-5)


def submit_abort_and_embed(engine: EngineLink) -> Any:
    """Complete all requests; abort a request, have a request refused, and embed a text."""
    aborted = EngineRequest(request_id=90, prompt=(9,) * 20, max_new_tokens=60)
    too_long = EngineRequest(request_id=91, prompt=(5,) * TOO_LONG, max_new_tokens=9)
    engine.submit([*engine_requests(), aborted, too_long])
    engine.receive_until(lambda: 91 in engine.replies and engine.outputs[0].tokens)
    engine.send({"kind": "abort", "id": aborted.request_id})
    for number in range(92, 102):  # between steps of running requests
        engine.send({"kind": "embed", "id": number, "prompt": [5, 6, 7]})
        engine.receive_until(lambda: number in engine.replies)  # noqa: B023
    assert not all(request.request_id in engine.ended for request in engine_requests())
    outputs = engine.finished(engine_requests())
    engine.receive_until(lambda: engine.stats[-1]["running"] == 0)
    error, vector = engine.replies[91]["error"], engine.replies[92]["result"]
    return outputs, engine.stats, engine.facts, error, vector


GRIDS = [
    pytest.param(2, "", id="dp2"),
    pytest.param(2, PP, id="pp2", marks=pytest.mark.slow(seconds=5)),
    pytest.param(2, f"{TP} --async-scheduling", id="tp2-async", marks=pytest.mark.slow(seconds=5)),
    pytest.param(2, "--async-scheduling", id="dp2-async", marks=pytest.mark.slow(seconds=5)),
    pytest.param(4, f"{TP} {PP}", id="tp2-pp2", marks=pytest.mark.slow(seconds=8)),
    pytest.param(4, f"{TP} --sequence-parallel", id="tp2-dp2", marks=pytest.mark.slow(seconds=8)),
    pytest.param(4, PP, id="pp2-dp2", marks=pytest.mark.slow(seconds=8)),
]


@pytest.mark.parametrize(("world", "flags"), GRIDS)
def test_ranks_answer_as_a_single_engine(
    folders: list[Path], single_engine: list[list[Completion]], world: int, flags: str
) -> None:
    replicas = world // ((1 + (TP in flags)) * (1 + (PP in flags)))
    outputs, stats, facts, error, vector = run(folders[0], world, flags, submit_abort_and_embed)
    assert_same_outputs(outputs, single_engine[0])
    assert str(TOO_LONG) in error
    # All rows of all replicas were used, and all blocks are free at the end.
    assert max(step["running"] for step in stats) == ROWS * replicas
    assert max(step["cache_usage"] for step in stats) > 0 == stats[-1]["cache_usage"]
    assert stats[-1]["waiting"] == 0 < max(output.cached_tokens for output in outputs)
    sizes = [facts[f"{kind}_parallel"] for kind in ("tensor", "pipeline", "data")]
    assert sizes == [1 + (TP in flags), 1 + (PP in flags), replicas]
    assert facts["async_scheduling"] == ("async" in flags)
    torch.testing.assert_close(torch.tensor(vector), embedding(make_model(0)), rtol=0, atol=1e-5)


def embedding(model: GPTModel) -> torch.Tensor:
    """Return the normalized mean of the final hidden states of a text of three tokens."""
    with torch.no_grad():
        vector = model(torch.tensor([[5, 6, 7]]))[:, 0].mean(0)
    return vector / vector.norm()


def classify_texts(engine: EngineLink, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the outputs of the classification head for texts."""
    engine.send(*({"kind": "embed", "id": n, "prompt": text} for n, text in enumerate(texts)))
    engine.receive_until(lambda: all(n in engine.replies for n in range(len(texts))))
    return [engine.replies[n]["result"] for n in range(len(texts))]


@pytest.mark.parametrize("flags", [f"{TP} --sequence-parallel", PP], ids=["tp2", "pp2"])
def test_ranks_classify_as_transformers(flags: str, tmp_path: Path) -> None:
    model = make_classifier("llama-3to1", 3, pad_token_id=9)
    save_folder(model, tmp_path)
    train_bpe(["abc"] * 3, 257, tmp_path / "tokenizer.json")
    texts = [[1, 2, 3, 4, 5], [6], [7, 8, 9], list(range(20, 43))]
    outputs = run(tmp_path, 2, flags, classify_texts, texts)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([text])).logits for text in texts])
    torch.testing.assert_close(torch.tensor(outputs), expected, rtol=0, atol=1e-5)


@pytest.mark.slow(seconds=6)
def test_expert_parallel_replicas_answer_as_a_single_engine(tmp_path: Path) -> None:
    moe = MoEConfig(num_experts=4, ffn_hidden_size=24, router=RouterConfig(topk=2))
    model = make_model(0, moe=moe, ffn_pattern="-E")
    folder = save(tmp_path, model, length=TOO_LONG)
    write_pooling(folder, "Transformer", "Pooling", "Normalize", pooling_mode="mean")
    flags = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    outputs, stats, facts, _, vector = run(folder, 2, flags, submit_abort_and_embed)
    assert_same_outputs(outputs, single_engine_outputs(folder))
    assert max(step["running"] for step in stats) == 2 * ROWS
    assert (facts["data_parallel"], facts["expert_parallel"]) == (2, 2)
    torch.testing.assert_close(torch.tensor(vector), embedding(model), rtol=0, atol=1e-5)


# --- administration -------------------------------------------------------------------------------


def pause_sleep_and_profile(engine: EngineLink) -> list[list[Completion]]:
    """Pause in all three modes, sleep, and profile; return the outputs of each running batch."""
    batches = []
    for n, mode in enumerate(("keep", "recompute")):
        requests = engine_requests(100 * n)
        engine.start(requests, 4)
        assert engine.control("pause", mode=mode)["result"]["paused"]
        engine.receive_until(lambda: engine.quiet > 1)
        assert engine.stats[-1]["paused"] == 1
        computed = [len(engine.outputs[a.request_id].tokens) for a in requests]
        assert engine.control("pause", mode="keep")["result"]["paused"]
        assert computed == [len(engine.outputs[a.request_id].tokens) for a in requests]
        assert not engine.control("resume")["result"]["paused"]
        batches.append(engine.finished(requests))
        assert (engine.stats[-1]["preempted"] > 0) == (mode == "recompute")
    requests = engine_requests(200)
    engine.start(requests, 4)
    profiled = engine.control("profile", steps=2)
    if engine.facts["async_scheduling"]:  # the profiler does not record the thread of these steps
        assert "asynchronous" in profiled["error"]
    else:
        assert profiled["result"]["steps"] == 2
    assert engine.control("sleep", level=1)["result"]["asleep"]
    engine.submit([EngineRequest(request_id=300, prompt=(5,) * LONG, max_new_tokens=5)])
    engine.receive_until(lambda: 300 in engine.replies)
    assert "asleep" in engine.replies[300]["error"]
    assert "wake" in engine.control("resume")["error"]
    assert not engine.control("wake")["result"]["asleep"]
    batches.append(engine.finished(requests))
    requests = engine_requests(400)
    engine.start(requests, 4)
    assert engine.control("pause", mode="abort")["result"]["paused"]
    assert {c.finish_reason for c in engine.finished(requests)} == {"abort"}
    assert engine.stats[-1]["running"] == engine.stats[-1]["waiting"] == 0
    engine.control("resume")
    requests = engine_requests(500)
    engine.submit(requests)
    batches.append(engine.finished(requests))
    return batches


ADMINISTERED = [
    pytest.param(2, TP, marks=pytest.mark.slow(seconds=8), id="tp2"),
    pytest.param(2, "", marks=pytest.mark.slow(seconds=8), id="dp2"),
    pytest.param(2, "--async-scheduling", marks=pytest.mark.slow(seconds=8), id="dp2-async"),
    pytest.param(2, PP, marks=pytest.mark.slow(seconds=8), id="pp2"),
]


@pytest.mark.parametrize(("world", "flags"), ADMINISTERED)
def test_pause_and_sleep_change_no_token(
    folders: list[Path], single_engine: list[list[Completion]], world: int, flags: str
) -> None:
    for outputs in run(folders[0], world, flags, pause_sleep_and_profile):
        assert_same_outputs(outputs, single_engine[0])


def replace_weights(engine: EngineLink, control: Mapping[str, Any]) -> tuple[Any, ...]:
    """Replace weights while requests run; return the answer, and the outputs during and after."""
    cached_request = EngineRequest(request_id=50, prompt=(9,) * LONG, max_new_tokens=1)
    for repeated in (cached_request, replace(cached_request, request_id=51)):
        engine.submit([repeated])
        engine.finished([repeated])
    assert engine.outputs[51].cached_tokens > 0
    during = engine_requests(100)
    engine.start(during, 4)
    refusal = engine.control("weights", load="/nowhere", address=None)
    assert "/nowhere" in refusal["error"]
    answer = engine.control("weights", **control)["result"]
    outputs_during = engine.finished(during)
    engine.submit([replace(cached_request, request_id=200)])
    engine.finished([replace(cached_request, request_id=200)])
    after = engine_requests(300)
    engine.submit(after)
    return (
        answer,
        outputs_during,
        engine.outputs[200].cached_tokens,
        engine.finished(after),
        engine.stats[-1]["epoch"],
    )


@pytest.mark.parametrize("source", ["folder", "sender"])
@pytest.mark.parametrize(("world", "flags"), ADMINISTERED)
def test_all_ranks_replace_their_weights(
    folders: list[Path], single_engine: list[list[Completion]], world: int, flags: str, source: str
) -> None:
    address, send_weights = f"127.0.0.1:{free_port()}", None
    control: dict[str, Any] = {"load": str(folders[1]), "address": None}
    if source == "sender":
        control = {"load": None, "address": address, "senders": 1, "timeout_seconds": 60.0}
        sender = TransferGroup(address=address, rank=0, senders=1, receivers=world)
        send_weights = lambda: sender.send(weight_chunks(make_model(1).store))  # noqa: E731
    script_result = run(folders[0], world, flags, replace_weights, control, act=send_weights)
    answer, outputs_during, cached, outputs_after, epoch = script_result
    assert answer["weight_epoch"] == epoch == 1
    assert source == "folder" or answer["received_bytes"] > 0
    for completion in outputs_during:
        assert completion.epochs == sorted(completion.epochs)
    epochs = {e for completion in outputs_during for e in completion.epochs}
    # With a sender, all requests may end before the weights arrive.
    assert epochs == {0, 1} if source == "folder" else 0 in epochs
    assert cached == 0  # caches and routers forget prefixes of the old weights
    assert_same_outputs(outputs_after, single_engine[1])
    assert {e for completion in outputs_after for e in completion.epochs} == {1}


# --- a rank is lost -------------------------------------------------------------------------------


def submit_until_the_engine_ends(engine: EngineLink) -> None:
    """Submit requests one after another until the engine process has ended."""
    long = EngineRequest(request_id=0, prompt=(5, 6), max_new_tokens=TOO_LONG - 2)
    engine.start([long], 2)
    print("start", flush=True)
    with contextlib.suppress(AssertionError, ConnectionError):
        while True:
            engine.submit(
                [EngineRequest(request_id=len(engine.outputs), prompt=(5, 6), max_new_tokens=40)]
            )
            engine.receive_until(lambda: len(engine.outputs) - 1 in engine.ended)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("flags", [TP, PP, ""], ids=["tp2", "pp2", "dp2"])
def test_loss_of_a_rank_ends_its_peers(folders: list[Path], flags: str) -> None:
    _store, launcher = serve_store(2)
    words = ["--load", str(folders[0]), *WORDS, *flags.split()]
    with start_ranks(
        serve_on_rank, 2, words, launcher, submit_until_the_engine_ends, (), init=False
    ) as ranks:
        ranks.wait_for_line(0, "start", timeout=60)
        ranks.kill(1)
        survivor, killed = ranks.outcomes(timeout=60)
    assert killed.exit_code == -9
    assert "PeerLost" in str(survivor.error)
