# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs of texts, and classes of texts: the routes of vLLM, Jina and Cohere.

A model with a classification head of one label scores a pair in one forward pass (cross-encoder).
A model with embeddings scores it by the cosine of both embeddings (bi-encoder).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.api.embeddings import pooled_vectors, text_names
from megatron.inference.server.chat_template import Conversation, Turn
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import (
    MAX_TOKENS,
    AccountFields,
    Body,
    NoEffect,
    Prompts,
    ServedValues,
    Text,
)
from megatron.inference.server.serving import SHORT_TEXTS, Route, Server, text_tokens

T = TypeVar("T")

#: Most pairs of one request.
MAX_PAIRS = 1000


class Document(Body):
    """A text as an object."""

    text: Text
    """The text."""


AnyText = Text | Document
Texts = Annotated[list[AnyText], Field(min_length=1, max_length=MAX_PAIRS)]


class PoolingBody(AccountFields):
    """Fields of all routes with scores or classes."""

    model: str | None = None
    """A served model name; another name is answered with 404."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    """Most tokens of a text or pair, special tokens included; the end is removed, and the longer
    text of a pair is shortened first. -1: as many as the model takes."""
    use_activation: bool | None = None
    """false: the outputs of the classification head, without sigmoid or softmax."""
    activation: bool | None = None
    """Former name of use_activation."""
    softmax: bool | None = None
    """Former name of use_activation."""
    mm_processor_kwargs: Annotated[Any, ServedValues(({},), "give texts")] = None
    priority: NoEffect = None
    request_id: NoEffect = None

    @property
    def activates(self) -> bool:
        """Whether the activation is applied to the outputs of the head."""
        names = (self.use_activation, self.activation, self.softmax)
        return next((value for value in names if value is not None), True)

    def max_tokens(self, max_length: int | None) -> int | None:
        """Return the most tokens of a text or pair; None for no limit. Raises ApiError."""
        if self.truncate_prompt_tokens == 0:
            raise ApiError(
                400,
                "truncate_prompt_tokens is 0: give a positive number, or -1",
                param="truncate_prompt_tokens",
            )
        return max_length if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class TextPairs(NamedTuple):
    """Pairs of texts, and their paths in the request."""

    texts: Sequence[tuple[str, str]]
    names: Sequence[tuple[str, str]]


class ScoreBody(PoolingBody):
    """`POST /score`: one text and several, or as many of both."""

    text_1: AnyText | Texts | None = None
    """One text for all pairs, or one for each pair; the texts at the beginning of the pairs."""
    text_2: AnyText | Texts | None = None
    """The texts at the end of the pairs."""
    queries: AnyText | Texts | None = None
    """Another name of text_1."""
    documents: AnyText | Texts | None = None
    """Another name of text_2."""
    items: AnyText | Texts | None = None
    """Another name of text_2."""
    data_1: AnyText | Texts | None = None
    """Another name of text_1."""
    data_2: AnyText | Texts | None = None
    """Another name of text_2."""

    @property
    def query_field(self) -> str:
        """The name of the field with the texts at the beginning of the pairs. Raises ApiError."""
        return self._present("text_1", "queries", "data_1")

    def pairs(self) -> TextPairs:
        """Return the pairs of texts. Raises ApiError."""
        fields = self.query_field, self._present("text_2", "documents", "items", "data_2")
        values = [getattr(self, field) for field in fields]
        queries, documents = ([_text_of(text) for text in _as_list(value)] for value in values)
        counts = len(queries), len(documents)
        query_names, document_names = map(text_names, fields, values, counts)
        if len(queries) == 1:
            queries, query_names = queries * len(documents), query_names * len(documents)
        if len(queries) != len(documents):
            raise ApiError(
                400,
                f"{fields[0]} has {counts[0]} texts and {fields[1]} has {counts[1]}: give one text "
                "and several, or as many of both",
                param=fields[0],
            )
        return TextPairs(
            list(zip(queries, documents, strict=True)),
            list(zip(query_names, document_names, strict=True)),
        )

    def _present(self, *names: str) -> str:
        """Return the name of the one field that is present."""
        present = [name for name in names if getattr(self, name) is not None]
        if len(present) != 1:
            raise ApiError(400, f"give exactly one of {', '.join(names)}", param=names[0])
        return present[0]


class RerankBody(PoolingBody):
    """`POST /rerank`: documents in the order of their scores with a query."""

    query: AnyText
    """The query."""
    documents: Texts
    """The documents, texts or objects with the field text."""
    top_n: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    """Number of results; 0: all documents."""
    return_documents: bool = True
    """Whether the results contain the texts."""
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Most tokens of a document; the end of a longer one is removed."""
    max_chunks_per_doc: Annotated[Any, ServedValues((1,), "use max_tokens_per_doc")] = None
    rank_fields: Annotated[Any, ServedValues((["text"],), "give documents as texts")] = None


class ClassifyBody(PoolingBody):
    """`POST /classify`."""

    input: Prompts
    """Texts or token ids, as `prompt` of completions."""
    add_special_tokens: bool = True
    """false: the tokenizer adds no special tokens to a text."""


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text_of(text: str | Document) -> str:
    return text if isinstance(text, str) else text.text


class PairScores(NamedTuple):
    """The scores of pairs of texts, and the number of tokens that were computed."""

    scores: Sequence[float]
    num_tokens: int


async def score(server: Server, request: Request) -> Response:
    """Answer `POST /score` and `/v1/score`."""
    body = await server.read(request, ScoreBody)
    pairs = body.pairs()
    scores, num_tokens = await _score_pairs(server, request, body, pairs, param=body.query_field)
    entries = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
    ]
    return JSONResponse({**_head(server, "score"), "data": entries, "usage": _usage(num_tokens)})


async def rerank(server: Server, request: Request) -> Response:
    """Answer `POST /rerank`, `/v1/rerank` and `/v2/rerank`."""
    body = await server.read(request, RerankBody)
    documents = [_text_of(document) for document in body.documents]
    query, names = _text_of(body.query), text_names("documents", documents, len(documents))
    pairs = TextPairs([(query, d) for d in documents], [("query", name) for name in names])
    scores, num_tokens = await _score_pairs(
        server,
        request,
        body,
        pairs,
        param="documents",
        max_document_tokens=body.max_tokens_per_doc,
    )
    order = sorted(range(len(documents)), key=lambda index: -scores[index])
    entries = [
        {
            "index": index,
            **({"document": {"text": documents[index]}} if body.return_documents else {}),
            "relevance_score": scores[index],
        }
        for index in order[: body.top_n or None]
    ]
    head = {"id": f"rerank-{secrets.token_hex(16)}", "model": server.card.name}
    return JSONResponse({**head, "results": entries, "usage": _usage(num_tokens)})


async def classify(server: Server, request: Request) -> Response:
    """Answer `POST /classify` and `/v1/classify`."""
    body = await server.read(request, ClassifyBody)
    server.check_model(body.model)
    classifier = server.classifier
    if classifier is None:
        raise ApiError(
            400,
            "this model has no classification head: start the server with a model that has one, "
            "a ...ForSequenceClassification of transformers",
        )
    max_tokens = body.max_tokens(server.card.max_length)
    special = server.tokenizer.special_tokens if body.add_special_tokens else None

    def truncated(tokens: list[int]) -> list[int]:
        if max_tokens is None or len(tokens) <= max_tokens:
            return tokens
        after = [] if special is None else list(special.after)
        return [*tokens[: max(0, max_tokens - len(after))], *after]

    tokens = await text_tokens(server, body.input, add_special_tokens=body.add_special_tokens)
    texts = [truncated(text) for text in tokens]
    names = text_names("input", body.input, len(texts))
    outputs = await pooled_vectors(
        server, request, texts, names=names, param="input", can_truncate=True
    )
    entries = []
    for index, values in enumerate(outputs):
        probs = classifier.scores(values) if body.activates else list(values)
        label = classifier.labels[int(np.argmax(values))]
        entries.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    usage = _usage(sum(map(len, texts)))
    return JSONResponse({**_head(server, "classify"), "data": entries, "usage": usage})


def _usage(num_tokens: int) -> Mapping[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _head(server: Server, kind: str) -> Mapping[str, Any]:
    return {
        "id": f"{kind}-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": server.card.name,
    }


async def _score_pairs(
    server: Server,
    request: Request,
    body: PoolingBody,
    pairs: TextPairs,
    *,
    param: str,
    max_document_tokens: int | None = None,
) -> PairScores:
    """Return the scores of pairs of texts.

    Args:
        server: the server.
        request: the HTTP request.
        body: its body.
        pairs: queries and documents.
        param: field that errors name.
        max_document_tokens: most tokens of a document, without special tokens.

    Raises:
        ApiError: the model has no scores, or does not take a text.
    """
    server.check_model(body.model)
    max_tokens, classifier = body.max_tokens(server.card.max_length), server.classifier
    if classifier is None and server.no_embeddings is not None:
        raise ApiError(400, f"this model does not compute scores: {server.no_embeddings}")
    if classifier is not None and len(classifier.labels) != 1:
        raise ApiError(
            400,
            f"this model has {len(classifier.labels)} labels, and a score needs a model with one: "
            "use /classify",
        )

    def tokenize() -> list[tuple[list[int], list[int]]]:
        texts = {text for pair in pairs.texts for text in pair}
        tokens = {t: server.tokenizer.tokenize(t, add_special_tokens=False) for t in texts}
        return [(tokens[query], tokens[doc][:max_document_tokens]) for query, doc in pairs.texts]

    num_chars = sum(map(len, {text for pair in pairs.texts for text in pair}))
    tokens = await _off_the_loop(tokenize, num_chars)
    if classifier is None:
        names = [name for pair in pairs.names for name in pair]
        return await _cosines(
            server, request, tokens, names=names, param=param, max_tokens=max_tokens
        )
    if server.has_score_template:
        texts = [
            await _rendered(
                server,
                *pair,
                document_tokens=document if len(document) == max_document_tokens else None,
                max_tokens=max_tokens,
            )
            for pair, (_, document) in zip(pairs.texts, tokens, strict=True)
        ]
    else:
        assert server.pair_tokens is not None
        texts = [server.pair_tokens.join(*pair, max_tokens=max_tokens) for pair in tokens]
    names = [f"the pair of {query} and {document}" for query, document in pairs.names]
    vectors = await pooled_vectors(
        server, request, texts, names=names, param=param, can_truncate=True
    )
    scores = [classifier.scores(vector) if body.activates else vector for vector in vectors]
    return PairScores([score for (score,) in scores], sum(map(len, texts)))


async def _rendered(
    server: Server,
    query: str,
    document: str,
    *,
    document_tokens: Sequence[int] | None,
    max_tokens: int | None,
) -> Sequence[int]:
    """Return the tokens of a pair as the chat template renders it: messages of the roles `query`
    and `document`.

    Args:
        server: the server.
        query, document: the texts.
        document_tokens: the tokens of a truncated document; None for the whole document.
        max_tokens: most tokens; the end is removed.

    Raises:
        ApiError: the template cannot render the texts.
    """
    if document_tokens is not None:
        document = server.tokenizer.detokenize(document_tokens)
    turns = [Turn(role="query", text=query), Turn(role="document", text=document)]
    prompt = await server.conversations.prompt(Conversation(turns=turns, answer_start="none"))
    return prompt.tokens[:max_tokens]


async def _cosines(
    server: Server,
    request: Request,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    names: Sequence[str],
    param: str,
    max_tokens: int | None,
) -> PairScores:
    """Return the cosine of the two embeddings of each pair; each text is embedded once."""
    special = server.tokenizer.special_tokens
    space = None
    if max_tokens is not None:
        space = max(0, max_tokens - len(special.before) - len(special.after))
    texts = [(*special.before, *t[:space], *special.after) for pair in pairs for t in pair]
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    name_of = dict(zip(reversed(texts), reversed(names), strict=True))
    row_names = [name_of[text] for text in rows]
    vectors = np.array(
        await pooled_vectors(
            server, request, list(rows), names=row_names, param=param, can_truncate=True
        )
    )
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors /= np.maximum(norms, np.finfo(np.float64).tiny)
    queries, documents = ([rows[text] for text in texts[side::2]] for side in (0, 1))
    cosines = np.einsum("ij,ij->i", vectors[queries], vectors[documents])
    return PairScores(cosines.tolist(), sum(map(len, rows)))


async def _off_the_loop(work: Callable[[], T], length: int) -> T:
    """Run the tokenization of so many characters, in a thread unless it is short."""
    return work() if length <= SHORT_TEXTS else await asyncio.to_thread(work)


ROUTES: Sequence[Route] = (
    *(("POST", f"{version}/score", score, ScoreBody) for version in ("", "/v1")),
    *(("POST", f"{version}/rerank", rerank, RerankBody) for version in ("", "/v1", "/v2")),
    *(("POST", f"{version}/classify", classify, ClassifyBody) for version in ("", "/v1")),
)
