# SPDX-License-Identifier: Apache-2.0
"""Embeddings are the hidden states of transformers, pooled by hand."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from megatron.cli.launch import Launch
from megatron.cli.tokenizers import train_bpe
from megatron.inference.checkpoint_model import load_checkpoint_model
from megatron.inference.config import ModelSource
from megatron.inference.server.embedder import Embedder, NoPooling, Pooling, read_pooling
from tests.support.closeness import assert_close_by_metric
from tests.support.hf_folders import make_model, save_folder, write_pooling
from tests.support.http_server import END, Served, served, until

TEXTS = ["a", "abc", "é and more of it", "abd", "q" * 40]


class Embeds:
    """The model of a folder in transformers and here."""

    def __init__(self, theirs: Any, model: Any) -> None:
        self.theirs, self.model = theirs, model
        self.pooling = Pooling(tokens="mean", normalize=True)
        self.max_tokens, self.passes = 60, 0

    def batch(self, lengths: list[int]) -> int:
        return self.embedder.batch(lengths)

    @property
    def embedder(self) -> Embedder:
        return Embedder(self.model, self.pooling, torch.device("cpu"), max_tokens=self.max_tokens)

    def __call__(self, texts: list[list[int]]) -> list[list[float]]:
        self.passes += 1
        return self.embedder(texts)

    def expected(self, text: str) -> torch.Tensor:
        tokens = torch.tensor([list(text.encode())])
        with torch.no_grad():
            states = self.theirs(tokens, output_hidden_states=True).hidden_states[-1][0]
        vector = states.sum(0) / len(states) if self.pooling.tokens == "mean" else states[-1]
        return vector / vector.square().sum().sqrt() if self.pooling.normalize else vector


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embeds]:
    folder = tmp_path_factory.mktemp("model")
    theirs = make_model("qwen3-8to1", vocab_size=END + 1)
    save_folder(theirs, folder)
    train_bpe(["abc"] * 3, 257, folder / "tokenizer.json")
    source = ModelSource(load=str(folder), device="cpu")
    with load_checkpoint_model(source, Launch.from_environment({})) as loaded:
        yield Embeds(theirs, loaded.model)


@pytest.fixture(scope="module")
def server(embeds: Embeds) -> Iterator[Served]:
    with served(embedder=embeds, no_embeddings=None, max_length=100) as found:
        yield found
        assert found.http.get("/health").json()["active"] == 0


@pytest.mark.parametrize("tokens", ["mean", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_those_of_transformers(
    server: Served, embeds: Embeds, tokens: Any, normalize: bool
) -> None:
    embeds.pooling = Pooling(tokens=tokens, normalize=normalize)
    before = embeds.passes
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="next-byte", input=TEXTS)  # in base64
        plain = client.embeddings.create(
            model="next-byte", input=list(b"abc"), encoding_format="float"
        )
    assert embeds.passes - before > 2  # a batch, the long text, the second request
    assert embeds.passes - before < len(TEXTS) + 1
    assert found.usage.prompt_tokens == sum(len(text.encode()) for text in TEXTS)
    for text, one in zip(["abc", *TEXTS], [*plain.data, *found.data], strict=True):
        assert_close_by_metric(text, torch.tensor(one.embedding), embeds.expected(text))


def test_texts_are_generated_between_embeddings(server: Served, embeds: Embeds) -> None:
    server.model.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        asked = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        text = pool.submit(server.post, "/v1/completions", **asked)
        until(lambda: server.http.get("/health").json()["active"] == 1)
        vectors = [pool.submit(server.post, "/v1/embeddings", input="abc") for _ in range(2)]
        until(lambda: server.http.get("/health").json()["active"] == 3)
        server.model.gate.set()
        assert text.result().json()["choices"][0]["text"] == "bcd"
        assert {one.result().status_code for one in vectors} == {200}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input": ""}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [9999]}, "9999"),
        ({"input": "a" * 101}, "101"),
        ({"input": "a" * 61}, "--inference-max-tokens"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_texts_that_cannot_be(server: Served, fields: dict[str, Any], told: str) -> None:
    response = server.post("/v1/embeddings", **fields)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_a_model_without_pooling_says_why() -> None:
    with served(no_embeddings="because") as server:
        response = server.post("/v1/embeddings", input="a")
        assert response.status_code == 400
        assert "because" in response.json()["error"]["message"]


def test_pooling_is_what_the_folder_says(tmp_path: Path) -> None:
    usual = ("Transformer", "Pooling", "Normalize")
    write_pooling(tmp_path, *usual, pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    assert read_pooling(tmp_path) == Pooling(tokens="mean", normalize=True)
    write_pooling(tmp_path, *usual[:2], pooling_mode_lasttoken=True, include_prompt=True)
    assert read_pooling(tmp_path) == Pooling(tokens="last", normalize=False)
    write_pooling(tmp_path, *usual, pooling_mode="lasttoken")
    assert read_pooling(tmp_path) == Pooling(tokens="last", normalize=True)
    for kinds, config in (
        (usual, {"pooling_mode_cls_token": True}),
        (usual, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}),
        (usual, {}),
        ((*usual[:2], "Dense"), {"pooling_mode": "mean"}),
        (usual[:1], {"pooling_mode": "mean"}),
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
