# SPDX-License-Identifier: Apache-2.0
"""Generation runs only forward operations: no autograd Function, and the logits of training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection
from megatron.core.comm import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from megatron.core.inference import EngineRequest, SamplingParams
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ops.backend_choice import ForwardOnly
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.one_batch import engine_of

CONFIG = GPTConfig(
    num_layers=5,
    pattern="G-*EM",
    hidden_size=24,
    vocab_size=61,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=32),
    moe=MoEConfig(router=RouterConfig(topk=2), num_experts=4, ffn_hidden_size=16),
    delta_net=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=6, value_channels=5
    ),
    mamba=Mamba2Config(num_heads=4, head_channels=7, state_channels=3),
)


GREEDY = SamplingParams(temperature=0)
PROMPTS = [
    EngineRequest(prompt=(1, 2, 3), max_new_tokens=4, sampling=GREEDY),
    EngineRequest(prompt=(4,), max_new_tokens=4, sampling=GREEDY),
]


def autograd_contexts(run: Callable[[], object]) -> list[type]:
    """Return the types of the autograd contexts that forwards receive while `run` runs."""
    types: list[type] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "forward" and "ctx" in frame.f_locals:
            types.append(type(frame.f_locals["ctx"]))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return types


def communication_calls(run: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the `megatron.core.comm` functions that `run` calls, with their callers' files."""
    calls: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        folder, _, name = frame.f_code.co_filename.rpartition("/")
        if event == "call" and folder.endswith("megatron/core/comm"):
            assert frame.f_back is not None
            calls.add((f"{name}: {frame.f_code.co_name}", frame.f_back.f_code.co_filename))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return GPTModel(CONFIG, ProcessGroupCollection.single(), seed=3)


def test_training_enters_autograd_functions(model: GPTModel):
    tokens = torch.arange(8).view(1, 8)
    types = autograd_contexts(lambda: model.loss(tokens, tokens, torch.full(tokens.shape, 0.125)))
    assert len(types) > 20
    assert ForwardOnly not in types


def test_prefill_and_decode_are_forward_only(model: GPTModel):
    engine = engine_of(model)
    for request in PROMPTS:
        engine.add(request)
    prefill, mixed, decode = (autograd_contexts(engine.step) for _ in range(3))
    for types in (prefill, mixed, decode):
        assert types
        assert set(types) == {ForwardOnly}


def test_gpt_generation_creates_no_autograd_context():
    shape = GPTConfig(
        num_layers=2,
        hidden_size=24,
        vocab_size=61,
        attention=CONFIG.attention,
        mlp=CONFIG.mlp,
    )
    model = GPTModel(shape, ProcessGroupCollection.single(), seed=3)
    engine = engine_of(model)
    for request in PROMPTS:
        engine.add(request)
    assert [autograd_contexts(engine.step) for _ in range(2)] == [[], []]
    assert engine.unfinished == 2


def test_one_rank_calls_no_collective(model: GPTModel):
    """Even a no-op wrapper for a group of one costs Python time in every layer."""
    tokens = torch.arange(8).view(1, 8)

    def train() -> None:
        model.loss(tokens, tokens, torch.full(tokens.shape, 0.125))[0].backward()

    engine = engine_of(model)
    for request in PROMPTS:
        engine.add(request)
    for run in (train, engine.step, engine.step, engine.step):
        assert communication_calls(run) == set()
    group = Group.single()
    assert communication_calls(lambda: reduce_from_group(torch.ones(1), group)), (
        "calls are recorded"
    )


@pytest.mark.parametrize(
    "wrapper",
    [
        copy_to_group,
        gather_from_group,
        reduce_from_group,
        reduce_scatter_to_group,
        scatter_to_group,
    ],
)
def test_wrappers_of_a_group_of_one_are_the_identity(wrapper):
    for gradients in (False, True):
        x = torch.ones(2, 3, requires_grad=gradients)
        assert wrapper(x, Group.single()) is x, "no autograd Function wraps it"


def test_logits_are_equal_with_and_without_grad(model: GPTModel):
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        without_grad = model.full_logits(tokens)
    assert torch.equal(without_grad, model.full_logits(tokens))
    assert not without_grad.requires_grad
