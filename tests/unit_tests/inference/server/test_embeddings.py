# SPDX-License-Identifier: Apache-2.0
"""Embeddings match transformers' hidden states with explicit pooling."""

from __future__ import annotations

import concurrent.futures
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from megatron.cli.launch import Launch
from megatron.cli.tokenizers import train_bpe
from megatron.inference import ModelSource
from megatron.inference.load_model import load_checkpoint_model
from megatron.inference.server.engine.embedder import Embedder, NoPooling, Pooling, read_pooling
from tests.support.closeness import assert_close_by_metric
from tests.support.hf_folders import make_model, save_folder, write_pooling
from tests.support.http_server import END, ConstantEmbedder, Served, served, until

TEXTS = ["a", "abc", "é and more of it", "abd", "q" * 40]


class RecordingEmbedder:
    """An embedder that counts forward passes, next to transformers' model of the same folder."""

    def __init__(self, hf_model: Any, model: Any) -> None:
        self.hf_model, self.model = hf_model, model
        self.pooling = Pooling(tokens="mean", normalize=True)
        self.max_tokens, self.passes = 60, 0

    def batch_size(self, lengths: list[int]) -> int:
        return self.embedder.batch_size(lengths)

    @property
    def embedder(self) -> Embedder:
        return Embedder(self.model, self.pooling, torch.device("cpu"), max_tokens=self.max_tokens)

    def __call__(self, texts: list[list[int]]) -> list[list[float]]:
        self.passes += 1
        return self.embedder(texts)

    def expected(self, text: str) -> torch.Tensor:
        tokens = torch.tensor([list(text.encode())])
        with torch.no_grad():
            states = self.hf_model(tokens, output_hidden_states=True).hidden_states[-1][0]
        vector = states.sum(0) / len(states) if self.pooling.tokens == "mean" else states[-1]
        return vector / vector.square().sum().sqrt() if self.pooling.normalize else vector


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingEmbedder]:
    folder = tmp_path_factory.mktemp("model")
    hf_model = make_model("qwen3-8to1", vocab_size=END + 1)
    save_folder(hf_model, folder)
    train_bpe(["abc"] * 3, 257, folder / "tokenizer.json")
    source = ModelSource(load=str(folder), device="cpu")
    with load_checkpoint_model(source, Launch.from_environment({})) as loaded:
        yield RecordingEmbedder(hf_model, loaded.model)


@pytest.fixture(scope="module")
def server(embeds: RecordingEmbedder) -> Iterator[Served]:
    with served(embedder=embeds, no_embeddings=None, max_length=100) as running:
        yield running
        assert running.http.get("/health").json()["active"] == 0


@pytest.mark.parametrize("tokens", ["mean", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings_match_transformers(
    server: Served,
    embeds: RecordingEmbedder,
    tokens: Any,
    normalize: bool,
    client: openai.OpenAI,
) -> None:
    embeds.pooling = Pooling(tokens=tokens, normalize=normalize)
    before = embeds.passes
    response = client.embeddings.create(model="next-byte", input=TEXTS)  # in base64
    float_response = client.embeddings.create(
        model="next-byte", input=list(b"abc"), encoding_format="float"
    )
    assert embeds.passes - before > 2  # a batch, the long text, the second request
    assert embeds.passes - before < len(TEXTS) + 1
    assert response.usage.prompt_tokens == sum(len(text.encode()) for text in TEXTS)
    for text, embedding in zip(
        ["abc", *TEXTS], [*float_response.data, *response.data], strict=True
    ):
        assert_close_by_metric(text, torch.tensor(embedding.embedding), embeds.expected(text))


def test_completions_run_between_embeddings(server: Served, embeds: RecordingEmbedder) -> None:
    server.model.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        fields = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        text = pool.submit(server.post, "/v1/completions", **fields)
        until(lambda: server.http.get("/health").json()["active"] == 1)
        vectors = [pool.submit(server.post, "/v1/embeddings", input="abc") for _ in range(2)]
        until(lambda: server.http.get("/health").json()["active"] == 3)
        server.model.gate.set()
        assert text.result().json()["choices"][0]["text"] == "bcd"
        assert {future.result().status_code for future in vectors} == {200}


def test_pooling_follows_the_folders_modules(tmp_path: Path) -> None:
    modules = ("Transformer", "Pooling", "Normalize")
    write_pooling(tmp_path, *modules, pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    assert read_pooling(tmp_path) == Pooling(tokens="mean", normalize=True)
    write_pooling(tmp_path, *modules[:2], pooling_mode_lasttoken=True, include_prompt=True)
    assert read_pooling(tmp_path) == Pooling(tokens="last", normalize=False)
    write_pooling(tmp_path, *modules, pooling_mode="lasttoken")
    assert read_pooling(tmp_path) == Pooling(tokens="last", normalize=True)
    for kinds, config in (
        (modules, {"pooling_mode_cls_token": True}),
        (modules, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}),
        (modules, {}),
        ((*modules[:2], "Dense"), {"pooling_mode": "mean"}),
        (modules[:1], {"pooling_mode": "mean"}),
    ):
        write_pooling(tmp_path, *kinds, **config)
        with pytest.raises(NoPooling):
            read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": "Transformer"}, {"type": "Pooling"}]')
    with pytest.raises(NoPooling):
        read_pooling(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(NoPooling, match=r"modules\.json"):
        read_pooling(tmp_path)


def num_active(server: Served) -> int:
    return server.http.get("/health").json()["active"]


def test_disconnected_embeddings_are_aborted() -> None:
    embedder = ConstantEmbedder()
    with served(embedder=embedder, no_embeddings=None, max_outputs=3) as server:
        server.engine.pause()  # texts wait
        with server.send("/v1/embeddings", input=["a", "b"]):
            until(lambda: num_active(server) == 2)
            assert server.post("/v1/embeddings", input=["c", "d"]).status_code == 429
        until(lambda: num_active(server) == 0)
        server.engine.resume()
        assert server.ok("/v1/embeddings", input="e")["data"][0]["embedding"] == [1.0, 0.0]
        # A text that the engine refuses aborts the other texts of its request.
        server.engine.pause()
        assert server.post("/v1/embeddings", input=["f", "g" * 61]).status_code == 400
        until(lambda: num_active(server) == 0)
        server.engine.resume()
        server.ok("/v1/embeddings", input="h")
        assert embedder.texts == [[ord("e")], [ord("h")]]


def test_loss_of_the_engine_ends_embeddings() -> None:
    options = {"embedder": ConstantEmbedder(), "no_embeddings": None}
    with served(**options) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        server.engine.pause()
        waiting = pool.submit(server.post, "/v1/embeddings", input=["a", "b"])
        until(lambda: num_active(server) == 2)
        server.link.shutdown(socket.SHUT_RDWR)
        assert waiting.result().status_code == 503
