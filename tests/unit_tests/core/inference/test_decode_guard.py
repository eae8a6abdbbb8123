# SPDX-License-Identifier: Apache-2.0
"""What a decode step of the optimized forward enters, traced: for every family of model.

No autograd Function runs, at tp 1 no collective is entered, and the host reads the device only for
the chosen tokens and what is reported with them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.core.inference.engine import Engine
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel
from megatron.core.process_groups import Group, ProcessGroupCollection
from megatron.core.transformer import NormConfig
from tests.unit_tests.core.inference.test_engine import FAMILIES, engine_of, model_of, requests

#: Functions of torch that wait for the device.
READS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu"})
#: Modules whose functions are wrappers of collectives.
COMM = "megatron.core.comm."
#: Where the line is looked for that asked for a read.
OURS = ("megatron.", "tests.")


class Reads(TorchFunctionMode):
    """Count what waits for the device, by the line of this project that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in READS:
            frame = sys._getframe(1)
            while not frame.f_globals.get("__name__", "").startswith(OURS) and frame.f_back:
                frame = frame.f_back
            self.found[f"{frame.f_globals['__name__']}:{frame.f_code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def entered() -> Iterator[Counter[str]]:
    """Count the Python functions of collectives and of autograd that are entered."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith(COMM) or (module, name) == ("torch.autograd.function", "apply"):
            found[f"{module}:{name}"] += 1

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


#: Norms and positions that no family of the engine's own tests has.
OTHERS = {
    "learned positions": (
        replace(FAMILIES["gqa"], rope=None, max_position_embeddings=64),
        torch.float32,
    ),
    "layer norm in bf16": (
        replace(FAMILIES["gqa"], norm=NormConfig(kind="LayerNorm")),
        torch.bfloat16,
    ),
}
GUARDED = (*FAMILIES, *OTHERS)


def decoding(family: str) -> Engine:
    """Return an engine whose next steps only decode."""
    if family in OTHERS:
        config, dtype = OTHERS[family]
        model = GPTModel(config, ProcessGroupCollection.single(), dtype=dtype, seed=3)
    else:
        model = model_of(family)
    engine = engine_of(model, max_step_tokens=500)
    engine.model = InferenceOptimizedModel(model)
    for request in requests():
        engine.add(request)
    while any(row.remaining > 1 for row in engine._outputs):
        engine.step()
    return engine


@pytest.mark.parametrize("family", GUARDED)
def test_a_decode_step_enters_no_function_and_no_collective(family: str) -> None:
    engine = decoding(family)
    with entered() as found:
        assert engine.step()
    assert not found


@pytest.mark.parametrize("planted", ["function", "collective"])
def test_the_tracer_sees_what_is_planted(planted: str) -> None:
    engine = decoding("gqa")
    forward = engine.model

    def slower(tokens, **context):
        hidden = forward(tokens, **context)
        if planted == "collective":
            from megatron.core.comm.conjugates import copy_to_group

            return copy_to_group(hidden, Group.single())
        return Nothing.apply(hidden)

    slower.head = forward.head
    engine.model = slower
    with entered() as found:
        engine.step()
    assert found


class Nothing(torch.autograd.Function):
    """The no-op that a reduction over one rank used to be."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


#: Modules that may read the device in a step: the engine the chosen tokens and what is said of
#: them; on a CPU what stands for a kernel there, of paged attention and of the experts' products.
READERS = frozenset(
    {
        "megatron.core.inference.engine",
        "megatron.core.ops.paged_attention.reference",
        "megatron.core.weight_gather.grouped",
    }
)


def readers(engine: Engine) -> set[str]:
    """Return the modules that read the device in a step."""
    with Reads() as reads:
        engine.step()
    return {place.split(":")[0] for place in reads.found}


@pytest.mark.parametrize("family", GUARDED)
def test_the_host_reads_only_what_was_chosen(family: str) -> None:
    found = readers(decoding(family))
    assert "megatron.core.inference.engine" in found
    assert not found - READERS
    assert ("megatron.core.weight_gather.grouped" in found) == (family == "experts")


def test_a_planted_read_is_seen() -> None:
    engine = decoding("gqa")
    forward = engine.model

    def slower(tokens, **context):
        hidden = forward(tokens, **context)
        assert hidden.isfinite().all().item()
        return hidden

    slower.head = forward.head
    engine.model = slower
    assert readers(engine) - READERS == {__name__}
