# SPDX-License-Identifier: Apache-2.0
"""A server with a scripted model, and the clients of it that the rows of the matrix call."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from tests.support.http_server import ConstantEmbedder, NextByte, Served, served
from tests.support.scripted_model import TEMPLATE, Scripted

# make clients installs the clients and runs these tests.
collect_ignore_glob = [] if importlib.util.find_spec("litellm") else ["test_*.py"]

# Clients that report usage or fetch tables of prices would wait for a network.
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LANGSMITH_TRACING="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
)

NAME = "next-byte"


class Certain(Scripted):
    """A `Scripted` model whose other tokens have no probability, as few clients set a temperature.

    A script of several answers gives one to each request, in the order of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: list[str] = []
        self._row: object = None

    def script(self, *answers: str) -> None:
        """Set the texts of the next answers."""
        self._answers, self._row = list(answers), None

    def __call__(
        self, tokens: torch.Tensor, *, layout: SequenceLayout, **context: object
    ) -> torch.Tensor:
        assert self.engine is not None
        (row,) = self.engine.scheduler.running
        if row is not self._row and self._answers:
            self._row = row
            self.say(self._answers.pop(0))
        return 100 * super().__call__(tokens, layout=layout, **context)


class CertainNextByte(NextByte):
    """A `NextByte` whose other tokens have no probability; it answers several requests at once."""

    def __call__(self, tokens: torch.Tensor, **context: object) -> torch.Tensor:
        return 100 * super().__call__(tokens, **context)


class Clients:
    """The clients of one server.

    Args:
        server: a server with a model that answers a script, tools, reasoning and embeddings.
        counting: a server whose model counts up bytes and which answers requests at once.
    """

    def __init__(self, server: Served, counting: Served) -> None:
        self.server, self.counting = server, counting
        self.url = server.url

    @functools.cached_property
    def openai(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @functools.cached_property
    def counting_openai(self) -> Any:
        return self.openai.with_options(base_url=f"{self.counting.url}/v1")

    def async_openai(self) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @functools.cached_property
    def anthropic(self) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)

    def async_anthropic(self) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0)

    def langchain(self, **options: Any) -> Any:
        """Return LangChain's chat model."""
        from langchain_openai import ChatOpenAI

        options = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options}
        return ChatOpenAI(model=NAME, **options)

    def litellm(self, provider: str, function: str = "completion", **options: Any) -> Any:
        """Call a function of LiteLLM."""
        import litellm

        litellm.suppress_debug_info = True
        base = self.url if provider == "anthropic" else f"{self.url}/v1"
        options = {"api_base": base, "api_key": "none", "num_retries": 0, **options}
        return getattr(litellm, function)(model=f"{provider}/{NAME}", **options)

    def instructor(self, mode: str, client: str = "openai") -> Any:
        """Return Instructor's client in a mode."""
        import instructor

        patch = instructor.from_openai if client == "openai" else instructor.from_anthropic
        return patch(getattr(self, client), mode=getattr(instructor.Mode, mode))


@pytest.fixture(scope="session")
def clients() -> Iterator[Clients]:
    """The clients of a server for scripts, and of a server that answers requests at once."""
    template = {"source": TEMPLATE, "name": "shows all"}
    formats = {"tools": "hermes", "reasoning": "qwen3"}
    embedder = {"embedder": ConstantEmbedder(), "no_embeddings": None}
    with (
        served(Certain(), template=template, formats=formats, **embedder) as server,
        served(CertainNextByte()) as counting,
    ):
        yield Clients(server, counting)
