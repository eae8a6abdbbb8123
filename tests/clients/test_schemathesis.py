# SPDX-License-Identifier: Apache-2.0
"""Schemathesis over the served OpenAPI document: every body gets an answer or an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis

from tests.clients.conftest import CertainNextByte
from tests.support.http_server import ConstantEmbedder, Served, served

pytestmark = pytest.mark.slow(seconds=60)

#: Statuses of answers, and of errors that a client can cause.
STATUSES = {200, 400, 401, 404, 405, 409, 413, 415, 429}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose answers are short, as few bodies limit them."""
    with served(
        CertainNextByte(), max_length=200, embedder=ConstantEmbedder(), no_embeddings=None
    ) as running:
        yield running
        assert running.engine.unfinished == 0


def test_bodies_of_the_document(server: Served) -> None:
    """Bodies that the document allows, and bodies that it does not allow."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json").include(method="POST")
    operations = [
        operation.ok() for operation in document.get_all_operations() if operation.ok().body
    ]
    assert {operation.path for operation in operations} > {"/v1/messages", "/v1/responses"}
    statuses: dict[str, set[int]] = {}
    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            cases = operation.as_strategy(generation_mode=mode)

            @hypothesis.given(cases)
            @hypothesis.settings(
                max_examples=20,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            def check(case: Any) -> None:
                answer = case.call(timeout=60)
                statuses.setdefault(case.path, set()).add(answer.status_code)
                assert answer.status_code in STATUSES, (answer.status_code, answer.text)
                if answer.status_code not in (200, 405):
                    assert answer.json()["error"]["message"]

            check()
    assert statuses["/v1/completions"] >= {200, 400}
