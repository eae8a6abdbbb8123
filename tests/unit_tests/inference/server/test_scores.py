# SPDX-License-Identifier: Apache-2.0
"""Scores, reranking and classification match transformers over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cohere
import httpx
import pytest
import torch

from megatron.cli.launch import Launch
from megatron.cli.tokenizers import train_bpe
from megatron.inference import ModelSource
from megatron.inference.load_model import load_checkpoint_model
from megatron.inference.serve import Service, classifier_settings
from megatron.inference.server.engine.embedder import Embedder, Pooling
from tests.support.hf_folders import make_classifier, save_folder
from tests.support.http_server import ConstantEmbedder, Served, error_of, served

QUERY = "abc ab"
DOCUMENTS = ["a", "abcabc and more of it", "é", "c" * 40, "abc ab", "ba"]
#: Ids of <s> and </s> in the tokenizer.
BEGIN, END = 257, 258
LABELS = ("bad", "fair", "good")


class Reference(NamedTuple):
    """A server, and the model and tokenizer of transformers of the same folder."""

    server: Served
    model: Any
    tokenizer: Any

    def outputs(self, *texts: str, **options: Any) -> list[float]:
        inputs = self.tokenizer(*texts, return_tensors="pt", **options)
        with torch.no_grad():
            return self.model(inputs["input_ids"]).logits[0].tolist()

    def num_tokens(self, *texts: str) -> int:
        return len(self.tokenizer(*texts)["input_ids"])

    def score(self, query: str, document: str, **options: Any) -> float:
        return float(torch.tensor(self.outputs(query, document, **options)).sigmoid())


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer that marks the texts of a pair, as Llama 3 and BERT do."""
    path = folder / "tokenizer.json"
    train_bpe(["abc"] * 3, 257, path)
    fields = json.loads(path.read_text())
    names = ["<s>", "</s>"]
    fields["added_tokens"] += [
        {"id": BEGIN + n, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for n, name in enumerate(names)
    ]  # fmt: skip
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in names)
    texts = [{"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB")]
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, texts[0], end],
        "pair": [begin, texts[0], end, end, texts[1], end],
        "special_tokens": {
            name: {"id": name, "ids": [BEGIN + n], "tokens": [name]} for n, name in enumerate(names)
        },
    }
    path.write_text(json.dumps(fields))


def serve_folder(
    folder: Path, num_labels: int, chat_template: str | None = None
) -> Iterator[Reference]:
    """Serve a model with a classification head."""
    transformers = pytest.importorskip("transformers")
    model = make_classifier(
        "qwen3-8to1", num_labels, vocab_size=END + 2, pad_token_id=END + 1, eos_token_id=END
    )
    if num_labels == len(LABELS):
        model.config.id2label = dict(enumerate(LABELS))
    save_folder(model, folder)
    write_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    source = ModelSource(load=str(folder), device="cpu")
    launch = Launch.from_environment({})
    with load_checkpoint_model(source, launch, allow_classifier=True) as loaded:
        pooling = Pooling(tokens="last", normalize=False, padding_token=END + 1)
        with served(
            tokenizer=loaded.tokenizer_choice,
            vocab_size=END + 2,
            max_length=100,
            no_embeddings="it has a classification head: use /score, /rerank or /classify",
            classifier=classifier_settings(loaded, Service(chat_template=chat_template)),
            template=chat_template and {"source": chat_template, "name": "score"},
            embedder=Embedder(loaded.model, pooling, torch.device("cpu"), max_tokens=120),
        ) as server:
            yield Reference(server, model, tokenizer)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield from serve_folder(tmp_path_factory.mktemp("reranker"), 1)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield from serve_folder(tmp_path_factory.mktemp("classifier"), len(LABELS))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs_match_transformers(reranker: Reference, path: str) -> None:
    response = reranker.server.ok(path, text_1=QUERY, text_2=DOCUMENTS)
    expected = [reranker.score(QUERY, document) for document in DOCUMENTS]
    assert [entry["score"] for entry in response["data"]] == pytest.approx(expected, abs=1e-5)
    assert [entry["index"] for entry in response["data"]] == list(range(len(DOCUMENTS)))
    assert {entry["object"] for entry in response["data"]} == {"score"}
    assert (response["object"], response["model"]) == ("list", "next-byte")
    assert response["usage"]["total_tokens"] == response["usage"]["prompt_tokens"]
    assert response["usage"]["prompt_tokens"] == sum(
        reranker.num_tokens(QUERY, document) for document in DOCUMENTS
    )


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, ["ab"]),
        ({"text_1": ["a"], "text_2": ["b", "c"]}, ["ab", "ac"]),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, ["ac", "bd"]),
        ({"queries": "a", "documents": ["b", {"text": "c"}]}, ["ab", "ac"]),
        ({"queries": {"text": "a"}, "items": ["b"]}, ["ab"]),
        ({"data_1": "a", "data_2": ["b", "b"]}, ["ab", "ab"]),
    ],
)
def test_texts_are_paired(reranker: Reference, fields: dict[str, Any], pairs: list[str]) -> None:
    response = reranker.server.ok("/score", **fields)
    expected = [reranker.score(*pair) for pair in pairs]
    assert [entry["score"] for entry in response["data"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["use_activation", "activation", "softmax"])
def test_outputs_without_activation(reranker: Reference, name: str) -> None:
    for value in (False, True):
        response = reranker.server.ok("/score", text_1="abc", text_2="c", **{name: value})
        logits = reranker.outputs("abc", "c")
        expected = reranker.score("abc", "c") if value else logits[0]
        assert response["data"][0]["score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("length", [5, 6, 9, 12, 30, 45, 200])
def test_pairs_are_truncated_as_in_transformers(reranker: Reference, length: int) -> None:
    for pair in (("ab" * 9, "c" * 20), ("c" * 20, "ba" * 3), ("a" * 7, "b" * 7)):
        fields = {"text_1": pair[0], "text_2": pair[1], "truncate_prompt_tokens": length}
        response = reranker.server.ok("/score", **fields)
        options = {"truncation": True, "max_length": length}
        expected = reranker.score(*pair, **options)
        assert response["data"][0]["score"] == pytest.approx(expected, abs=1e-5)
        tokens = reranker.tokenizer(*pair, **options)["input_ids"]
        assert response["usage"]["prompt_tokens"] == len(tokens)
    too_long = {"text_1": "a" * 60, "text_2": "b" * 60}
    for path, fields, name in (
        ("/score", too_long, "text_1 and text_2 "),
        ("/score", {"queries": "a", "items": ["b", "b" * 120]}, "queries and items.1 "),
        ("/rerank", {"query": "a", "documents": ["b", "b" * 120]}, "query and documents.1 "),
        ("/classify", {"input": ["a", "b" * 120]}, "input.1 "),
    ):
        error = error_of(reranker.server.post(path, **fields))
        assert error["code"] == "context_length_exceeded"
        assert name in error["message"]
        assert "truncate_prompt_tokens" in error["message"]
    usage = reranker.server.ok("/score", **too_long, truncate_prompt_tokens=-1)["usage"]
    assert usage["prompt_tokens"] == 100  # the maximum length of the model


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_documents(reranker: Reference, path: str) -> None:
    scores = [reranker.score(QUERY, document) for document in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda n: -scores[n])
    documents = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    response = reranker.server.ok(path, query=QUERY, documents=documents, top_n=4)
    assert response.keys() == {"id", "model", "results", "usage"}
    assert [entry["index"] for entry in response["results"]] == order[:4]
    for entry in response["results"]:
        assert entry["document"] == {"text": DOCUMENTS[entry["index"]]}
        assert entry["relevance_score"] == pytest.approx(scores[entry["index"]], abs=1e-5)
    answer = reranker.server.ok(path, query=QUERY, documents=documents, return_documents=False)
    assert [entry.keys() for entry in answer["results"]] == [{"index", "relevance_score"}] * 6


def test_documents_are_truncated(reranker: Reference) -> None:
    fields = {"query": QUERY, "documents": ["abc" * 5, "ab"], "max_tokens_per_doc": 4}
    response = reranker.server.ok("/rerank", **fields)
    cut = reranker.tokenizer.decode(
        reranker.tokenizer("abc" * 5, add_special_tokens=False)["input_ids"][:4]
    )
    expected = [reranker.score(QUERY, cut), reranker.score(QUERY, "ab")]
    scores = {entry["index"]: entry["relevance_score"] for entry in response["results"]}
    assert [scores[0], scores[1]] == pytest.approx(expected, abs=1e-5)
    # The results contain the whole document.
    assert {r["document"]["text"] for r in response["results"]} == {"abc" * 5, "ab"}


def test_more_documents_than_the_queue_holds(reranker: Reference) -> None:
    documents = [f"{n:b}" for n in range(250)]
    results = reranker.server.ok("/rerank", query="a", documents=documents)["results"]
    assert sorted(entry["index"] for entry in results) == list(range(250))
    entry = next(entry for entry in results if entry["index"] == 249)
    assert entry["relevance_score"] == pytest.approx(reranker.score("a", documents[249]), abs=1e-5)


def test_score_template_renders_pairs(tmp_path: Path) -> None:
    template = (
        "<s>{% for role in ('query', 'document') %}[{{ role }}] "
        "{{ (messages | selectattr('role', 'equalto', role) | first)['content'] }}</s>{% endfor %}"
    )

    def rendered(document: str) -> str:
        return f"<s>[query] {QUERY}</s>[document] {document}</s>"

    def score(document: str, **options: Any) -> float:
        outputs = reranker.outputs(rendered(document), add_special_tokens=False, **options)
        return float(torch.tensor(outputs).sigmoid())

    with contextlib.contextmanager(serve_folder)(tmp_path, 1, template) as reranker:
        post = reranker.server.ok
        response = post("/score", text_1=QUERY, text_2=DOCUMENTS)
        scores = [entry["score"] for entry in response["data"]]
        assert scores == pytest.approx([score(text) for text in DOCUMENTS], abs=1e-5)
        response = post("/score", text_1=QUERY, text_2="abc", truncate_prompt_tokens=9)
        expected = score("abc", truncation=True, max_length=9)
        assert response["data"][0]["score"] == pytest.approx(expected, abs=1e-5)
        response = post("/rerank", query=QUERY, documents=["é" * 9], max_tokens_per_doc=4)
        assert response["results"][0]["relevance_score"] == pytest.approx(score("éé"), abs=1e-5)
        assert response["results"][0]["document"]["text"] == "é" * 9


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_match_transformers(classifier: Reference, path: str) -> None:
    response = classifier.server.ok(path, input=DOCUMENTS)
    for entry, document in zip(response["data"], DOCUMENTS, strict=True):
        probs = torch.tensor(classifier.outputs(document)).softmax(0)
        assert entry["probs"] == pytest.approx(probs.tolist(), abs=1e-5)
        assert entry["label"] == LABELS[int(probs.argmax())]
        assert entry["num_classes"] == len(LABELS)
    num_tokens = sum(map(classifier.num_tokens, DOCUMENTS))
    assert response["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    fields = {"input": "abcab", "add_special_tokens": False, "use_activation": False}
    raw = classifier.server.ok(path, **fields)
    expected = classifier.outputs("abcab", add_special_tokens=False)
    assert raw["data"][0]["probs"] == pytest.approx(expected, abs=1e-5)
    tokens = classifier.tokenizer("abcab")["input_ids"]
    assert classifier.server.ok(path, input=tokens)["data"][0]["probs"] == pytest.approx(
        torch.tensor(classifier.outputs("abcab")).softmax(0).tolist(), abs=1e-5
    )
    cut = classifier.server.ok(path, input="abcab" * 4, truncate_prompt_tokens=7)
    expected = classifier.outputs("abcab" * 4, truncation=True, max_length=7)
    expected = torch.tensor(expected).softmax(0).tolist()
    assert cut["data"][0]["probs"] == pytest.approx(expected, abs=1e-5)


def test_invocations_reach_scores(reranker: Reference) -> None:
    post = reranker.server.ok
    assert post("/invocations", text_1="a", text_2="b")["data"][0]["object"] == "score"
    assert post("/invocations", query="a", documents=["b"])["results"]
    assert post("/invocations", input="a")["data"][0]["label"] == "LABEL_0"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0},
         "truncate_prompt_tokens"),
        ("/score", {"text_1": "a", "text_2": "b", "useActivation": False}, "useActivation"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "topN": 1}, "topN"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["b"] * 1001}, "documents"),
        ("/classify", {"input": [5000]}, "input"),
        ("/v1/completions", {"prompt": "a"}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None),
        ("/v1/responses", {"input": "a"}, None),
        ("/v1/embeddings", {"input": "a"}, None),
    ],
)  # fmt: skip
def test_invalid_requests(
    reranker: Reference, path: str, fields: dict[str, Any], param: str | None
) -> None:
    error = error_of(reranker.server.post(path, **fields))
    assert error["param"] == param
    if param is None:
        assert "classification head" in error["message"]


def test_scores_need_a_model_with_one_label(classifier: Reference, byte_server: Served) -> None:
    pair = {"text_1": "a", "text_2": "b"}
    assert "3 labels" in error_of(classifier.server.post("/score", **pair))["message"]
    error_of(byte_server.post("/score", **pair))
    error_of(byte_server.post("/rerank", query="a", documents=["b"]))
    error_of(byte_server.post("/classify", input="a"))
    error_of(classifier.server.post("/classify", input="a", model="other"), 404)


class LetterCounts(ConstantEmbedder):
    """An embedder: a vector of the number of each byte."""

    max_tokens = 1000

    def __call__(self, texts: list[list[int]]) -> list[list[float]]:
        self.texts += texts
        return [[float(text.count(byte)) for byte in b"abc"] for text in texts]


def test_score_of_embeddings_is_their_cosine() -> None:
    embedder = LetterCounts()
    with served(embedder=embedder, no_embeddings=None) as server:
        response = server.ok("/score", text_1="aab", text_2=["aab", "b", "c", "aaabbb"])
        expected = [1.0, 1 / 5**0.5, 0.0, 9 / (5 * 18) ** 0.5]
        assert [entry["score"] for entry in response["data"]] == pytest.approx(expected)
        # Each text is embedded once.
        assert sorted(map(bytes, embedder.texts)) == [b"aaabbb", b"aab", b"b", b"c"]
        assert response["usage"]["prompt_tokens"] == 11
        response = server.ok("/rerank", query="b", documents=["ba", "cb", "b"], top_n=1)
        assert [entry["index"] for entry in response["results"]] == [2]
        cut = server.ok("/score", text_1="ab", text_2="abbb", truncate_prompt_tokens=2)
        assert cut["data"][0]["score"] == pytest.approx(1.0)
        assert server.post("/classify", input="a").status_code == 400


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("name", ["Client", "ClientV2"])
def test_clients_of_cohere(reranker: Reference, name: str) -> None:
    scores = [reranker.score(QUERY, document) for document in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda n: -scores[n])
    with httpx.Client(trust_env=False) as http:
        options = {"base_url": reranker.server.url, "httpx_client": http}
        client = getattr(cohere, name)("key", **options)
        response = client.rerank(model="next-byte", query=QUERY, documents=DOCUMENTS, top_n=3)
        assert [entry.index for entry in response.results] == order[:3]
        assert [entry.relevance_score for entry in response.results] == pytest.approx(
            [scores[n] for n in order[:3]], abs=1e-5
        )
        with pytest.raises(cohere.errors.BadRequestError):
            client.rerank(model="next-byte", query="a", documents=[])
        with pytest.raises(cohere.errors.NotFoundError):
            client.rerank(model="other", query="a", documents=["b"])
