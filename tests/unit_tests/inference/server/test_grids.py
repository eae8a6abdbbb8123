# SPDX-License-Identifier: Apache-2.0
"""The engine process on several ranks, against one engine alone: tokens, administration, and the
loss of a rank. The test speaks to rank 0 as the HTTP process does."""

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
from megatron.core.dist_checkpointing import TransferGroup, weight_chunks
from megatron.core.inference.engine import Completion, Request, generate
from megatron.core.inference.sampling import SamplingParams
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig
from megatron.core.moe.moe_config import RouterConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.inference import serve
from megatron.inference.checkpoint_model import load_checkpoint_model
from megatron.inference.config import Inference, ModelSource, ServeConfig
from megatron.inference.llm import LLM
from megatron.inference.server.protocol import EngineRequest, FrameReader, OutputDelta, frame
from tests.support.hf_folders import write_pooling
from tests.support.launchers import serve_store
from tests.support.ranks import start_ranks
from tests.unit_tests.inference.test_checkpoint_model import CONFIG, save

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
#: A rank runs three outputs at a time.
ROWS = 3
SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "logprobs": 2})
LONG, TOO_LONG = 40, 90
WORDS = ["--device", "cpu", "--inference-max-requests", "3", "--inference-memory-gb", "0.0005"]


def asks(first: int = 0, new: int = 24) -> list[EngineRequest]:
    """Return eight asks: of two prefixes, drawn and not, the last with all that may be reported."""
    found = []
    for n in range(8):
        prefix = [3 + n % 2] * LONG
        found.append(
            EngineRequest(
                id=first + n,
                prompt=[*prefix, *range(7, 8 + n)],
                max_new_tokens=new - n,
                sampling=SAMPLINGS[n // 2 % 2],
                sequence=n,
                prompt_logprobs=n == 7,
            )
        )
    return found


def model_of(seed: int, config: GPTConfig = CONFIG) -> GPTModel:
    return GPTModel(config, ProcessGroupCollection.single(), seed=seed, dtype=torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one model with two sets of weights."""
    root = tmp_path_factory.mktemp("grids")
    config = {"bf16": False, "max-position-embeddings": TOO_LONG}
    found = [save(root / str(seed), model_of(seed), config=config) for seed in (0, 1)]
    write_pooling(found[0], "Transformer", "Pooling", "Normalize", pooling_mode="mean")
    return found


def request_of(ask: EngineRequest) -> Request:
    return Request(
        prompt=tuple(ask.prompt),
        max_new_tokens=ask.max_new_tokens,
        sampling=SamplingParams(**ask.sampling),
        stop_tokens=frozenset(ask.stop_tokens),
        sequence=ask.sequence,
        prompt_logprobs=ask.prompt_logprobs,
    )


def of_one_engine(folder: Path) -> list[Completion]:
    source = ModelSource(load=str(folder), device="cpu")
    with load_checkpoint_model(source, Launch.from_environment({})) as loaded:
        engine = LLM(loaded, Inference(inference_max_requests=ROWS)).engine
        return [one for (one,) in generate(engine, map(request_of, asks()))]


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[list[Completion]]:
    """What one engine says to `asks` with either weights."""
    found = [of_one_engine(folder) for folder in folders]
    assert [one.tokens for one in found[0]] != [one.tokens for one in found[1]]
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Talk:
    """The other end of the link to rank 0, and what has come from there."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._reader = link, FrameReader()
        self.outputs: dict[int, Completion] = {}
        self.ended: dict[int, OutputDelta] = {}
        self.cached: dict[int, int] = {}
        self.stats: list[Mapping[str, Any]] = []
        self.quiet = 0  # steps without news, since the last one with some
        self.facts: Mapping[str, Any] = {}
        self._done: dict[int, Mapping[str, Any]] = {}
        self._next_order = 1000

    def send(self, *messages: Mapping[str, Any]) -> None:
        self._link.sendall(b"".join(map(frame, messages)))

    def ask(self, wanted: Sequence[EngineRequest]) -> None:
        self.outputs |= {a.id: Completion.begin(request_of(a), a.id, 0) for a in wanted}
        self.send(*(a.to_json() for a in wanted))

    def hear(self, holds: Callable[[], object]) -> None:
        """Listen until a condition holds."""
        while not holds():
            data = self._link.recv(1 << 20)
            assert data, "the engine process has ended"
            for message in self._reader.feed(data):
                self._take(message)

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "facts":
            self.facts = message["facts"]
        elif message["kind"] == "done":
            self._done[message["id"]] = message
        elif message["kind"] == "step":
            self.stats.append(message["stats"])
            self.quiet = 0 if message["news"] else self.quiet + 1
            for fields in message["news"]:
                self._add(OutputDelta(**fields))

    def _add(self, news: OutputDelta) -> None:
        found = self.outputs[news.id]
        self.cached.setdefault(news.id, news.cached_tokens)
        for name in ("tokens", "logprobs", "epochs", "top_logprobs"):
            vars(found)[name] += getattr(news, name)
        if news.prompt_logprobs is not None:
            found.prompt_logprobs = list(news.prompt_logprobs)
        found.finish_reason = news.finish_reason
        if news.finish_reason or news.refused:
            self.ended[news.id] = news

    def ends(self, wanted: Sequence[EngineRequest]) -> list[Completion]:
        """Return outputs once all of them have ended."""
        self.hear(lambda: all(a.id in self.ended for a in wanted))
        return [self.outputs[a.id] for a in wanted]

    def order(self, action: str, **fields: Any) -> Mapping[str, Any]:
        """Have something administered; return the answer."""
        number, self._next_order = self._next_order, self._next_order + 1
        self.send({"kind": "control", "id": number, "action": action, **fields})
        self.hear(lambda: number in self._done)
        return self._done[number]

    def begun(self, wanted: Sequence[EngineRequest], count: int) -> None:
        """Ask, and wait until some output has so many tokens, and none has ended."""
        self.ask(wanted)
        self.hear(lambda: any(len(self.outputs[a.id].tokens) >= count for a in wanted))
        assert not any(a.id in self.ended for a in wanted)


Script = Callable[..., Any]


def served_on_a_rank(
    rank: int, world: int, words: list[str], launcher: dict[str, str], script: Script, args: Any
) -> Any:
    """Run the engine process of a rank; on rank 0 a thread runs a script as the HTTP process."""
    line = parse_command_line(ServeConfig, words, prog="serve", description="")
    launch = Launch.from_environment({**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    keys = (None, None)
    if rank:
        serve.serve(line.config, launch, None, keys=keys, addresses=())
        return None
    link, other_end = socket.socketpair()
    found: list[Any] = []

    def talk() -> None:
        with other_end:
            found.append(script(Talk(other_end), *args))

    with link:
        thread = threading.Thread(target=talk)
        thread.start()
        serve.serve(line.config, launch, link, keys=keys, addresses=())
        thread.join()
    return found[0]


def run(folder: Path, world: int, more: str, script: Script, *args: Any, act: Any = None) -> Any:
    """Run a script against the engine process on some ranks; return what it returns.

    `act` is called meanwhile.
    """
    _store, launcher = serve_store(world)
    words = ["--load", str(folder), *WORDS, *more.split()]
    with start_ranks(served_on_a_rank, world, words, launcher, script, args, init=False) as ranks:
        if act is not None:
            act()
        return ranks.values(timeout=90)[0]


def assert_as_one(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    assert len(found) == len(wanted)
    for got, expected in zip(found, wanted, strict=True):
        assert got.tokens == expected.tokens, expected.index
        assert got.finish_reason == expected.finish_reason
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        tops = [[[token for token, _ in one] for one in c.top_logprobs] for c in (got, expected)]
        assert tops[0] == tops[1]
        if expected.prompt_logprobs is not None:
            assert got.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-5)


def answer_and_leave(talk: Talk) -> Any:
    """Have all answered, one aborted, one refused and a text embedded."""
    left, long = EngineRequest(id=90, prompt=[9] * 20, max_new_tokens=60), [5] * TOO_LONG
    talk.ask([*asks(), left, EngineRequest(id=91, prompt=long, max_new_tokens=9)])
    talk.hear(lambda: 91 in talk.ended and talk.outputs[0].tokens)
    talk.send({"kind": "abort", "id": left.id})
    for number in range(92, 102):  # between steps that run
        talk.ask([EngineRequest(id=number, prompt=[5, 6, 7], max_new_tokens=0, embed=True)])
        talk.hear(lambda: number in talk.ended)  # noqa: B023
    assert not all(ask.id in talk.ended for ask in asks())
    found = talk.ends(asks())
    talk.hear(lambda: talk.stats[-1]["running"] == 0)
    refused = talk.ended[91].refused
    return found, talk.stats, talk.facts, refused, list(talk.ended[92].embedding)


GRIDS = [
    pytest.param(2, "", id="dp2"),
    pytest.param(2, PP, id="pp2", marks=pytest.mark.slow(seconds=5)),
    pytest.param(2, f"{TP} --async-scheduling", id="tp2-async", marks=pytest.mark.slow(seconds=5)),
    pytest.param(2, "--async-scheduling", id="dp2-async", marks=pytest.mark.slow(seconds=5)),
    pytest.param(4, f"{TP} {PP}", id="tp2-pp2", marks=pytest.mark.slow(seconds=8)),
    pytest.param(4, f"{TP} --sequence-parallel", id="tp2-dp2", marks=pytest.mark.slow(seconds=8)),
    pytest.param(4, PP, id="pp2-dp2", marks=pytest.mark.slow(seconds=8)),
]


@pytest.mark.parametrize(("world", "more"), GRIDS)
def test_ranks_answer_as_one_engine(
    folders: list[Path], alone: list[list[Completion]], world: int, more: str
) -> None:
    replicas = world // ((1 + (TP in more)) * (1 + (PP in more)))
    found, stats, facts, refused, vector = run(folders[0], world, more, answer_and_leave)
    assert_as_one(found, alone[0])
    assert str(TOO_LONG) in refused
    # As many rows as all replicas have, and all blocks are free in the end.
    assert max(one["running"] for one in stats) == ROWS * replicas
    assert max(one["cache_usage"] for one in stats) > 0 == stats[-1]["cache_usage"]
    assert stats[-1]["waiting"] == 0 < stats[-1]["prefix_hit"]
    sizes = [facts[f"{kind}_parallel"] for kind in ("tensor", "pipeline", "data")]
    assert sizes == [1 + (TP in more), 1 + (PP in more), replicas]
    assert facts["async_scheduling"] == ("async" in more)
    torch.testing.assert_close(torch.tensor(vector), embedding([5, 6, 7]), rtol=0, atol=1e-5)


def embedding(tokens: list[int], config: GPTConfig = CONFIG) -> torch.Tensor:
    """Return the normalized mean of the final hidden states of the first weights."""
    with torch.no_grad():
        vector = model_of(0, config)(torch.tensor([tokens]))[:, 0].mean(0)
    return vector / vector.norm()


@pytest.mark.slow(seconds=6)
def test_replicas_that_share_experts_answer_as_one_engine(tmp_path: Path) -> None:
    moe = MoEConfig(num_experts=4, ffn_hidden_size=24, router=RouterConfig(topk=2))
    config = replace(CONFIG, moe=moe, ffn_pattern="-E")
    options = {"bf16": False, "max-position-embeddings": TOO_LONG}
    folder = save(tmp_path, model_of(0, config), model=config.to_json(), config=options)
    write_pooling(folder, "Transformer", "Pooling", "Normalize", pooling_mode="mean")
    more = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    found, stats, facts, _, vector = run(folder, 2, more, answer_and_leave)
    assert_as_one(found, of_one_engine(folder))
    assert max(one["running"] for one in stats) == 2 * ROWS
    assert (facts["data_parallel"], facts["expert_parallel"]) == (2, 2)
    torch.testing.assert_close(
        torch.tensor(vector), embedding([5, 6, 7], config), rtol=0, atol=1e-5
    )


# --- administration -------------------------------------------------------------------------------


def paused_and_asleep(talk: Talk) -> list[list[Completion]]:
    """Pause in the three ways, sleep, and profile; return what was answered around that."""
    found = []
    for n, mode in enumerate(("keep", "recompute")):
        wanted = asks(100 * n)
        talk.begun(wanted, 4)
        assert talk.order("pause", mode=mode)["told"]["paused"]
        talk.hear(lambda: talk.quiet > 1)
        assert talk.stats[-1]["paused"] == 1
        computed = [len(talk.outputs[a.id].tokens) for a in wanted]
        assert talk.order("pause", mode="keep")["told"]["paused"]
        assert computed == [len(talk.outputs[a.id].tokens) for a in wanted]
        assert not talk.order("resume")["told"]["paused"]
        found.append(talk.ends(wanted))
        assert (talk.stats[-1]["preempted"] > 0) == (mode == "recompute")
    wanted = asks(200)
    talk.begun(wanted, 4)
    profiled = talk.order("profile", steps=2)
    if talk.facts["async_scheduling"]:  # they run in a thread that the profiler does not see
        assert "asynchronous" in profiled["refused"]
    else:
        assert profiled["told"]["steps"] == 2
    assert talk.order("sleep", level=1)["told"]["asleep"]
    refused = EngineRequest(id=300, prompt=[5] * LONG, max_new_tokens=5)
    talk.ask([refused])
    talk.hear(lambda: 300 in talk.ended)
    assert "asleep" in talk.ended[300].refused
    assert "wake" in talk.order("resume")["refused"]
    assert not talk.order("wake")["told"]["asleep"]
    found.append(talk.ends(wanted))
    wanted = asks(400)
    talk.begun(wanted, 4)
    assert talk.order("pause", mode="abort")["told"]["paused"]
    assert {c.finish_reason for c in talk.ends(wanted)} == {"abort"}
    assert talk.stats[-1]["running"] == talk.stats[-1]["waiting"] == 0
    talk.order("resume")
    wanted = asks(500)
    talk.ask(wanted)
    found.append(talk.ends(wanted))
    return found


ADMINISTERED = [
    pytest.param(2, TP, marks=pytest.mark.slow(seconds=8), id="tp2"),
    pytest.param(2, "", marks=pytest.mark.slow(seconds=8), id="dp2"),
    pytest.param(2, "--async-scheduling", marks=pytest.mark.slow(seconds=8), id="dp2-async"),
    pytest.param(2, PP, marks=pytest.mark.slow(seconds=8), id="pp2"),
]


@pytest.mark.parametrize(("world", "more"), ADMINISTERED)
def test_pauses_and_sleep_of_ranks_change_no_token(
    folders: list[Path], alone: list[list[Completion]], world: int, more: str
) -> None:
    for found in run(folders[0], world, more, paused_and_asleep):
        assert_as_one(found, alone[0])


def with_other_weights(talk: Talk, order: Mapping[str, Any]) -> tuple[Any, ...]:
    """Replace weights while all run; return the answer, what ran, and what comes after."""
    known = EngineRequest(id=50, prompt=[9] * LONG, max_new_tokens=1)
    for again in (known, replace(known, id=51)):
        talk.ask([again])
        talk.ends([again])
    assert talk.cached[51] > 0
    during = asks(100)
    talk.begun(during, 4)
    nothing = talk.order("weights", load="/nowhere", address=None)
    assert "/nowhere" in nothing["refused"]
    told = talk.order("weights", **order)["told"]
    ran = talk.ends(during)
    talk.ask([replace(known, id=200)])
    talk.ends([replace(known, id=200)])
    after = asks(300)
    talk.ask(after)
    return told, ran, talk.cached[200], talk.ends(after), talk.stats[-1]["epoch"]


@pytest.mark.parametrize("source", ["folder", "sender"])
@pytest.mark.parametrize(("world", "more"), ADMINISTERED)
def test_all_ranks_take_other_weights(
    folders: list[Path], alone: list[list[Completion]], world: int, more: str, source: str
) -> None:
    address, act = f"127.0.0.1:{free_port()}", None
    order: dict[str, Any] = {"load": str(folders[1]), "address": None}
    if source == "sender":
        order = {"load": None, "address": address, "senders": 1, "timeout_seconds": 60.0}
        sender = TransferGroup(address=address, rank=0, senders=1, receivers=world)
        act = lambda: sender.send(weight_chunks(model_of(1).store))  # noqa: E731
    found = run(folders[0], world, more, with_other_weights, order, act=act)
    told, ran, cached, after, epoch = found
    assert told["weight_epoch"] == epoch == 1
    assert source == "folder" or told["received_bytes"] > 0
    for completion in ran:
        assert completion.epochs == sorted(completion.epochs)
    epochs = {e for completion in ran for e in completion.epochs}
    assert epochs == {0, 1} if source == "folder" else 0 in epochs  # all may end while they come
    assert cached == 0  # neither a cache nor a router knows prefixes of the old weights
    assert_as_one(after, alone[1])
    assert {e for completion in after for e in completion.epochs} == {1}


# --- a rank is lost -------------------------------------------------------------------------------


def ask_until_it_is_gone(talk: Talk) -> None:
    """Ask for one output after another until the engine process has ended."""
    long = EngineRequest(id=0, prompt=[5, 6], max_new_tokens=TOO_LONG - 2)
    talk.begun([long], 2)
    print("begun", flush=True)
    with contextlib.suppress(AssertionError, ConnectionError):
        while True:
            talk.ask([EngineRequest(id=len(talk.outputs), prompt=[5, 6], max_new_tokens=40)])
            talk.hear(lambda: len(talk.outputs) - 1 in talk.ended)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("more", [TP, PP, ""], ids=["tp2", "pp2", "dp2"])
def test_the_loss_of_a_rank_ends_the_others(folders: list[Path], more: str) -> None:
    _store, launcher = serve_store(2)
    words = ["--load", str(folders[0]), *WORDS, *more.split()]
    with start_ranks(
        served_on_a_rank, 2, words, launcher, ask_until_it_is_gone, (), init=False
    ) as ranks:
        ranks.wait_for_line(0, "begun", timeout=60)
        ranks.kill(1)
        lead, other = ranks.outcomes(timeout=60)
    assert other.exit_code == -9
    assert "PeerLost" in str(lead.error)
