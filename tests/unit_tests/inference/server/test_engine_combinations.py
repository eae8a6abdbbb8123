# SPDX-License-Identifier: Apache-2.0
"""Random combinations of engine options through HTTP, each with 44 concurrent outputs, against a
full forward pass of transformers: several outputs per prompt, cut streams and aborts among them."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.cli.launch import Launch
from megatron.cli.tokenizers import train_bpe
from megatron.inference import LLM, Inference, ModelSource
from megatron.inference.config import Speculation, check
from megatron.inference.load_model import load_checkpoint_model
from tests.support.hf_folders import LENGTH, make_model, save_folder
from tests.support.http_server import ADMIN_KEY, END, Served, served_engine, until
from tests.support.inputs import one_thread

NUM_ROWS, NUM_DEFAULT_ROWS = 40, 3
OUTPUTS = 44
FACTORS: dict[str, Sequence[Any]] = {
    "case": (
        "llama-3to1", "llama-tied-llama3", "qwen3-window", "qwen2-3to1-linear", "mixtral",
        "deepseek", "qwen3next", "nemotronh",
    ),
    "dtype": (torch.float32, torch.float32, torch.bfloat16),
    "scarce": (False, False, True),
    "transformer_impl": ("auto", "local", "inference_optimized"),
    "batch_invariant": (False, False, True),
    "inference_max_requests": (5, 16, OUTPUTS),
    "inference_max_tokens": (48, 100, 2048),
    "inference_block_size": (16, 32),
    "no_prefix_caching": (False, False, True),
    "async_scheduling": (False, True),
    "enforce_eager": (False, True),
    "speculative_method": (None, None, "ngram", "draft"),
}  # fmt: skip


class Row(NamedTuple):
    """Options of one server, and the memory of its cache."""

    case: str
    dtype: torch.dtype
    scarce: bool
    source: ModelSource
    inference: Inference
    speculation: Speculation


def fields_of(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in kind.__dataclass_fields__}  # type: ignore[attr-defined]


def draw_row(number: int, folder: str = "") -> Row:
    """Return row `number`: the first draw whose options are valid together."""
    drawer = random.Random(number)
    while True:
        values = {name: drawer.choice(choices) for name, choices in FACTORS.items()}
        # Each family occurs equally often.
        values["case"] = FACTORS["case"][number % len(FACTORS["case"])]
        draft = folder if values["speculative_method"] == "draft" else None
        source = ModelSource(load=folder, device="cpu", **fields_of(ModelSource, values))
        inference = Inference(**fields_of(Inference, values))
        speculation = Speculation(speculative_draft_model=draft, **fields_of(Speculation, values))
        try:
            check(source, inference, speculation)
        except ValueError:
            continue
        return Row(
            values["case"], values["dtype"], values["scarce"], source, inference, speculation
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def model_of(root: Path, case: str, dtype: torch.dtype) -> tuple[Any, str]:
    """Return a model of transformers and its folder."""
    hf_model = make_model(case, vocab_size=END + 1, eos_token_id=None).to(dtype)
    folder = root / f"{case}-{dtype}"
    save_folder(hf_model, folder)
    train_bpe(["abc"] * 3, END + 1, folder / "tokenizer.json")
    return hf_model, str(folder)


class Client(NamedTuple):
    """One HTTP request: how it is read, and the number of its outputs."""

    prompt: list[int]
    max_tokens: int
    n: int = 1
    stream: bool = False
    cut_after: int | None = None
    """Number of chunks after which the client closes its stream; 0 aborts before any token."""
    allowed: tuple[int, ...] = ()
    """The only tokens of the outputs; () allows all."""


def clients_of(number: int) -> list[Client]:
    """Return the requests of a row: 44 outputs in random order."""
    drawer = random.Random(1000 + number)
    prefixes = [[drawer.randrange(END) for _ in range(40)] for _ in range(3)]

    def client(**fields: Any) -> Client:
        prefix = drawer.choice(prefixes)[: drawer.choice((3, 17, 40))]
        # Repeated, as in texts for which n-gram lookups propose drafts.
        prompt = prefix + 2 * [drawer.randrange(END) for _ in range(drawer.randrange(3, 13))]
        return Client(prompt=prompt, max_tokens=drawer.randrange(4, 25), **fields)

    clients = [client() for _ in range(11)]
    # Outputs of two tokens repeat themselves, so that every n-gram lookup proposes drafts.
    clients += [client(n=3, allowed=tuple(drawer.sample(range(END), 2))) for _ in range(4)]
    clients += [client(stream=True) for _ in range(13)]
    clients += [client(stream=True, cut_after=drawer.randrange(1, 5)) for _ in range(4)]
    clients += [client(cut_after=0) for _ in range(4)]
    drawer.shuffle(clients)
    assert sum(client.n for client in clients) == OUTPUTS
    return clients


#: Largest median error in bf16, in units of the rounding of transformers itself: the
#: difference of two independent roundings has sqrt(2).
BF16_NOISES = 2

Output = tuple[list[int], list[float]]


def outputs_of(server: Served, client: Client) -> list[Output]:
    """Send a request; return the tokens and log-probabilities of its outputs as far as read."""
    fields = {
        "prompt": client.prompt,
        "max_tokens": client.max_tokens,
        "n": client.n,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
        "ignore_eos": True,
        "allowed_token_ids": client.allowed or None,
    }
    if not client.stream:
        choices = server.ok("/v1/completions", **fields)["choices"]
        return [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices]
    tokens: list[int] = []
    logprobs: list[float] = []
    with server.http.stream("POST", "/v1/completions", json={**fields, "stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        for count, line in enumerate(lines, 1):
            (choice,) = json.loads(line[6:])["choices"]
            tokens += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
            if count == client.cut_after:
                break
    assert client.cut_after or len(tokens) == client.max_tokens
    return [(tokens, logprobs)]


def run_clients(server: Served, clients: Sequence[Client]) -> list[list[Output]]:
    """Send all requests while the engine is paused; return the outputs of each request."""
    server.administer("pause", mode="keep")
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as executor:
        connections, answers = [], []
        for client in clients:
            if client.cut_after == 0:
                body = {"prompt": client.prompt, "max_tokens": client.max_tokens}
                connections.append(server.send("/v1/completions", **body, n=client.n))
            else:
                answers.append(executor.submit(outputs_of, server, client))
        until(lambda: server.http.get("/load").json() == {"server_load": OUTPUTS})
        for connection in connections[::2]:
            connection.close()  # before any token
        assert server.administer("resume").status_code == 200
        for connection in connections[1::2]:
            connection.close()
        return [answer.result() for answer in answers]


def expected_logprobs(hf_model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities [t, v] at the positions of an output, of a full forward pass."""
    with one_thread(), torch.no_grad():
        logits = hf_model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].double().log_softmax(-1)


class Errors(NamedTuple):
    """Errors of the tokens [t] of an output against transformers.

    Args:
        logprob: log-probability minus the expected one.
        gap: log-probability by which the token misses the most probable allowed token.
        noise: rounding of transformers itself: its log-probability minus the one in fp32.
    """

    logprob: torch.Tensor
    gap: torch.Tensor
    noise: torch.Tensor


def errors_of(hf_models: Sequence[Any], client: Client, output: Output) -> Errors:
    """Return the errors of an output.

    Args:
        hf_models: the model of transformers, and the same weights in fp32.
        client: the request.
        output: an output of the request.
    """
    tokens, logprobs = output
    index = torch.tensor(tokens)[:, None]
    expected, exact = (expected_logprobs(model, client.prompt, tokens) for model in hf_models)
    allowed = list(client.allowed) or slice(None)
    token_logprobs = expected.gather(1, index)[:, 0]
    return Errors(
        logprob=torch.tensor(logprobs).double() - token_logprobs,
        gap=expected[:, allowed].max(-1).values - token_logprobs,
        noise=token_logprobs - exact.gather(1, index)[:, 0],
    )


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=() if n < NUM_DEFAULT_ROWS else pytest.mark.slow(seconds=5))
        for n in range(NUM_ROWS)
    ],
)
def test_combined_options_match_transformers(number: int, root: Path) -> None:
    row = draw_row(number)
    hf_model, folder = model_of(root, row.case, row.dtype)
    row = draw_row(number, folder)
    clients = clients_of(number)
    launch = Launch.from_environment({})
    block_size = row.inference.inference_block_size
    blocks = math.ceil(LENGTH / block_size) + 2 if row.scarce else None
    with load_checkpoint_model(row.source, launch, speculation=row.speculation) as loaded:
        engine = LLM(loaded, row.inference, num_blocks=blocks).engine
        options = {"max_length": LENGTH, "max_outputs": OUTPUTS, "admin_key": ADMIN_KEY}
        with served_engine(engine, loaded=loaded, **options) as server:
            answers = run_clients(server, clients)
            until(lambda: server.engine.unfinished == 0)
            until(lambda: server.http.get("/load").json() == {"server_load": 0})
        assert engine.scheduler.kv_cache.pool.references == 0
        stats = engine.stats
    assert not row.inference.no_prefix_caching or stats.hit == 0
    assert stats.preempted > 0 or not row.scarce
    method = row.speculation.speculative_method
    assert (stats.drafted > 0) == (method is not None)
    exact_model = copy.deepcopy(hf_model).float()
    read_clients = [client for client in clients if client.cut_after != 0]
    errors = [
        errors_of((hf_model, exact_model), client, output)
        for client, outputs in zip(read_clients, answers, strict=True)
        for output in outputs
    ]
    assert len(errors) == OUTPUTS - 4
    logprob, gap, noise = (torch.cat(values) for values in zip(*errors, strict=True))
    print(
        f"combination {number}: {row.case} {row.dtype} log-probabilities: "
        f"largest error {float(logprob.abs().max()):.1e}, median {typical(logprob):.1e}, "
        f"median of transformers {typical(noise):.1e}"
    )
    if row.dtype == torch.float32:
        assert float(gap.max()) == 0
        assert float(logprob.abs().max()) <= 1e-4
    else:
        assert typical(logprob) <= BF16_NOISES * typical(noise)
        assert float(gap.max()) <= 2 * BF16_NOISES * worst(noise)


def typical(values: torch.Tensor) -> float:
    """Return the median magnitude: in bf16 some tokens are routed to other experts, with any
    error."""
    return float(values.abs().median())


def worst(values: torch.Tensor) -> float:
    """Return the largest magnitude."""
    return float(values.abs().max())
