# SPDX-License-Identifier: Apache-2.0
"""Servers and clients that the tests of several APIs share; a file with other needs has its own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.http_server import Served, served
from tests.support.scripted_model import TEMPLATE, Scripted


@pytest.fixture(scope="package")
def byte_server() -> Iterator[Served]:
    """A server of `NextByte` without a key."""
    with served() as running:
        yield running
        assert running.engine.unfinished == 0


@pytest.fixture(scope="package")
def chat_server() -> Iterator[Served]:
    """A server of `Scripted` with tool calls, reasoning and stored responses."""
    with served(
        Scripted(),
        template={"source": TEMPLATE, "name": "shows all"},
        template_variables=["enable_thinking"],
        formats={"tools": "hermes", "reasoning": "qwen3"},
        response_store_bytes=200_000,
    ) as running:
        yield running


@pytest.fixture
def server(byte_server: Served) -> Served:
    """The server of a test."""
    return byte_server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client
