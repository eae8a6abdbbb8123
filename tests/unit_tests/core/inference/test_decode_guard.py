# SPDX-License-Identifier: Apache-2.0
"""Calls of a decode step of the optimized forward, traced by line for every model family.

No autograd Function runs. One rank enters no collective. The host reads the device only for the
chosen tokens and their reported values. Only operations create tensors, as their outputs. The
exceptions are listed with their families and reasons.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FrameType

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import copy_to_group, trace
from megatron.core.inference import Engine
from megatron.core.models import GPTModel, InferenceOptimizedModel
from megatron.core.transformer import NormConfig
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import FAMILIES, engine_of, model_of, requests

#: Functions of torch that wait for the device.
READS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu"})
#: Functions of torch that create a tensor from host numbers or without values.
MAKES = frozenset(
    {"arange", "as_tensor", "eye", "from_numpy", "full", "linspace", "scalar_tensor", "tensor"}
) | {f"{kind}{like}" for kind in ("empty", "full", "ones", "zeros") for like in ("", "_like")}
MAKES |= {f"new_{kind}" for kind in ("empty", "full", "ones", "tensor", "zeros")}
#: Modules whose functions are wrappers of collectives.
COMM = "megatron.core.comm."
#: Prefixes of modules in which a call site may be.
PROJECT_MODULES = ("megatron.", "tests.")


def call_site(frame: FrameType) -> str:
    """Return the call site module:function:line of this project that led to a frame."""
    while not frame.f_globals.get("__name__", "").startswith(PROJECT_MODULES) and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}:{frame.f_code.co_name}:{frame.f_lineno}"


@dataclass
class StepCalls(TorchFunctionMode):
    """Count by call site: host reads, created tensors, autograd Functions and collectives."""

    reads: Counter[str] = field(default_factory=Counter)
    makes: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS:
            self.reads[call_site(sys._getframe(1))] += 1
        if name in MAKES:
            self.makes[call_site(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))

    def _note(self, frame: FrameType, event: str, called: object) -> None:
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            if called is torch.from_numpy:  # invisible to TorchFunctionMode
                self.makes[call_site(frame)] += 1
            elif isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
                self.functions[call_site(frame)] += (
                    1  # `apply` of the base class, which weights call
                )
        elif event == "call":
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            caller = frame.f_back or frame
            if (module, name) == ("torch.autograd.function", "apply"):
                self.functions[call_site(caller)] += 1
            elif module.startswith(COMM) and not name.startswith("<"):
                self.collectives[call_site(caller)] += 1

    @staticmethod
    def of(run: Callable[[], object]) -> StepCalls:
        """Return the calls counted while `run` runs."""
        recorded = StepCalls()
        sys.setprofile(recorded._note)
        try:
            with recorded:
                run()
        finally:
            sys.setprofile(None)
        return recorded


def modules(call_sites: Counter[str]) -> set[str]:
    return {call_site.split(":")[0] for call_site in call_sites}


#: Norms and positions that no family of the engine tests has.
EXTRA_CONFIGS = {
    "learned positions": (
        replace(FAMILIES["gqa"], rope=None, max_position_embeddings=64),
        torch.float32,
    ),
    "layer norm in bf16": (
        replace(FAMILIES["gqa"], norm=NormConfig(kind="LayerNorm")),
        torch.bfloat16,
    ),
    "fp32": (FAMILIES["gqa"], torch.float32),
}
GUARDED = (*FAMILIES, *EXTRA_CONFIGS)
ALL_FAMILIES = frozenset(GUARDED)

CORE = "megatron.core"
#: Modules that may read the device in a step -> (families, reason).
READERS = {
    f"{CORE}.inference.sampling": (ALL_FAMILIES, "the chosen tokens and their reported values"),
    f"{CORE}.ops.paged_attention.cpu": (ALL_FAMILIES, "on a CPU in place of a kernel"),
    f"{CORE}.ops.grouped_mm": ({"experts"}, "on a CPU in place of a grouped product"),
}
#: Modules that may create tensors in a step -> (families, reason).
MAKERS = {
    f"{CORE}.inference.model_runner": (
        ALL_FAMILIES,
        "the step's inputs, sent to the device in one copy",
    ),
    f"{CORE}.ops.paged_attention.cpu": (ALL_FAMILIES, "on a CPU in place of a kernel"),
    f"{CORE}.moe.dispatch": ({"experts"}, "counts of experts, initially zero"),
    f"{CORE}.ops.permutation": ({"experts"}, "the order of rows, inverted"),
    f"{CORE}.ops.grouped_mm.cpu": ({"experts"}, "the result of several products"),
    f"{CORE}.ops.rope.cpu": ({"latent"}, "the result of a rotation"),
    f"{CORE}.ops.recurrence.ssd": ({"hybrid"}, "the sum with the skip connection"),
    f"{CORE}.ops.recurrence.decode.cpu": ({"hybrid"}, "on a CPU in place of a kernel"),
    f"{CORE}.ops.recurrence.gated_norm.cpu": ({"hybrid"}, "the result of a norm"),
}


def expected_modules(
    listed: dict[str, tuple[set[str] | frozenset[str], str]], family: str
) -> set[str]:
    return {module for module, (families, _) in listed.items() if family in families}


def decoding_engine(
    family: str, groups: ProcessGroupCollection | None = None, *, sequence_parallel: bool = False
) -> Engine:
    """Return an engine whose next steps only decode."""
    layout = {"sequence_parallel": True} if sequence_parallel else {}
    if family in EXTRA_CONFIGS:
        config, dtype = EXTRA_CONFIGS[family]
        groups = groups or ProcessGroupCollection.single()
        model = GPTModel(config, groups, dtype=dtype, seed=3, **layout)
    else:
        model = model_of(family, groups, **layout)
    token_multiple = model.region.group.size if sequence_parallel else 1
    engine = engine_of(model, max_num_batched_tokens=500, token_multiple=token_multiple)
    engine.runner.model = InferenceOptimizedModel(model)
    for request in requests():
        engine.add(request)
    while any(row.num_new_tokens > 1 for row in engine._outputs):
        engine.step()
    engine.step()  # creates buffers for this many tokens
    return engine


@pytest.mark.parametrize("family", GUARDED)
def test_decode_step_calls_reads_and_creates_only_listed_names(family: str) -> None:
    engine = decoding_engine(family)
    calls = StepCalls.of(engine.step)
    assert engine.unfinished == len(requests())
    assert not calls.functions
    assert not calls.collectives
    assert modules(calls.reads) == expected_modules(READERS, family), calls.reads
    assert modules(calls.makes) == expected_modules(MAKERS, family), calls.makes


def no_op(hidden: torch.Tensor) -> torch.Tensor:
    return NoOp.apply(hidden)


def no_op_of_the_base(hidden: torch.Tensor) -> torch.Tensor:
    return super(torch.autograd.Function, NoOp).apply(hidden)


def collective(hidden: torch.Tensor) -> torch.Tensor:
    return copy_to_group(hidden, Group.single())


def read(hidden: torch.Tensor) -> torch.Tensor:
    assert hidden.isfinite().all().item()
    return hidden


def constant(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.tensor(1.0, dtype=hidden.dtype)


def range_of_tokens(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.index_select(0, torch.arange(hidden.shape[0]))


def zeros(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + torch.zeros_like(hidden)


PLANTED = {
    "functions": (no_op, no_op_of_the_base),
    "collectives": (collective,),
    "reads": (read,),
    "makes": (constant, range_of_tokens, zeros),
}


@pytest.mark.parametrize(
    ("kind", "planted"),
    [(kind, function) for kind, functions in PLANTED.items() for function in functions],
)
def test_planted_call_is_reported_with_its_line(kind: str, planted: Callable) -> None:
    engine = decoding_engine("gqa")
    forward = engine.runner.model

    def planted_forward(tokens, **context):
        return planted(forward(tokens, **context))

    planted_forward.head = forward.head
    engine.runner.model = planted_forward
    call_sites = getattr(StepCalls.of(engine.step), kind)
    line = planted.__code__.co_firstlineno + 1
    assert f"{__name__}:{planted.__name__}:{line}" in call_sites


class NoOp(torch.autograd.Function):
    """A no-op autograd Function, as a reduction over one rank could be."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


#: Modules that create the outputs of collectives.
COLLECTIVE_MODULES = {f"{CORE}.comm.collectives"}
#: Families traced on two ranks -> (reduce-scatters, all-gathers) of a step. Each block has one of
#: each, latent attention three gathers. The embedding is scattered; the final hidden states and the
#: logits are gathered.
ON_RANKS = {"gqa": (5, 6), "experts": (5, 6), "latent": (5, 10), "hybrid": (7, 8)}
#: Each rank has half of the experts, unsharded; in other cases a rank has shards of all experts.
WHOLE_EXPERTS = "whole experts"


def steps_on_rank(rank: int, world: int) -> dict[str, tuple[StepCalls, Counter[str]]]:
    sharded_groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    grid = RankGrid(world_size=world, tp=world, etp=1, ep=world)
    whole_groups = ProcessGroupCollection.create(grid, rank=rank)
    steps = {}
    with one_thread():
        for case in (*ON_RANKS, WHOLE_EXPERTS):
            family, groups = (
                ("experts", whole_groups) if case == WHOLE_EXPERTS else (case, sharded_groups)
            )
            engine = decoding_engine(family, groups, sequence_parallel=True)
            with trace(groups) as records:
                step = StepCalls.of(engine.step)
            collectives = Counter(record.kind for record in records)
            steps[case] = step, collectives
    return steps


def test_tensor_parallel_step_has_only_expected_collectives() -> None:
    for steps in run_ranks(steps_on_rank, 2):
        for case, (step, collectives) in steps.items():
            family = "experts" if case == WHOLE_EXPERTS else case
            assert not step.functions, case
            assert modules(step.reads) == expected_modules(READERS, family), step.reads
            assert modules(step.makes) == expected_modules(MAKERS, family) | COLLECTIVE_MODULES, (
                step.makes
            )
            kinds = collectives["reduce_scatter"], collectives["all_gather"]
            assert kinds == ON_RANKS[family], (family, collectives)
