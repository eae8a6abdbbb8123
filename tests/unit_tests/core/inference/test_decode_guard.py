# SPDX-License-Identifier: Apache-2.0
"""What a decode step of the optimized forward enters, traced by line: for every family of model.

No autograd Function runs; on one rank no collective is entered; the host reads the device only for
the chosen tokens and what is reported with them; no tensor is made but in the results of
operations. The exceptions are named, with the families that have them and the reason.
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

from megatron.core.comm import trace
from megatron.core.comm.conjugates import copy_to_group
from megatron.core.inference.engine import Engine
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.transformer import NormConfig
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import FAMILIES, engine_of, model_of, requests

#: Functions of torch that wait for the device.
READS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu"})
#: Functions of torch that make a tensor of numbers of the host, or of nothing.
MAKES = frozenset(
    {"arange", "as_tensor", "eye", "from_numpy", "full", "linspace", "scalar_tensor", "tensor"}
) | {f"{kind}{like}" for kind in ("empty", "full", "ones", "zeros") for like in ("", "_like")}
MAKES |= {f"new_{kind}" for kind in ("empty", "full", "ones", "tensor", "zeros")}
#: Modules whose functions are wrappers of collectives.
COMM = "megatron.core.comm."
#: Where the line is looked for that asked.
OURS = ("megatron.", "tests.")


def place(frame: FrameType) -> str:
    """Return module:function:line of this project that a frame was called from."""
    while not frame.f_globals.get("__name__", "").startswith(OURS) and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}:{frame.f_code.co_name}:{frame.f_lineno}"


@dataclass
class Steps(TorchFunctionMode):
    """Note by place what waits for the device, makes a tensor, or enters an autograd Function or a
    collective."""

    reads: Counter[str] = field(default_factory=Counter)
    makes: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS:
            self.reads[place(sys._getframe(1))] += 1
        if name in MAKES:
            self.makes[place(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))

    def _note(self, frame: FrameType, event: str, called: object) -> None:
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            if called is torch.from_numpy:  # no mode sees it
                self.makes[place(frame)] += 1
            elif isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
                self.functions[place(frame)] += 1  # `apply` of the base class, which weights call
        elif event == "call":
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            caller = frame.f_back or frame
            if (module, name) == ("torch.autograd.function", "apply"):
                self.functions[place(caller)] += 1
            elif module.startswith(COMM) and not name.startswith("<"):
                self.collectives[place(caller)] += 1

    @staticmethod
    def of(run: Callable[[], object]) -> Steps:
        """Return what is found while something runs."""
        found = Steps()
        sys.setprofile(found._note)
        try:
            with found:
                run()
        finally:
            sys.setprofile(None)
        return found


def modules(places: Counter[str]) -> set[str]:
    return {place.split(":")[0] for place in places}


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
    "one type": (FAMILIES["gqa"], torch.float32),
}
GUARDED = (*FAMILIES, *OTHERS)
EVERY = frozenset(GUARDED)

CORE = "megatron.core"
#: Modules that may read the device in a step, the families in which they do, and why.
READERS = {
    f"{CORE}.inference.sampling": (EVERY, "the chosen tokens and what is said of them"),
    f"{CORE}.ops.paged_attention.reference": (EVERY, "on a CPU in place of a kernel"),
    f"{CORE}.ops.grouped_mm": ({"experts"}, "on a CPU in place of a grouped product"),
}
#: Modules that may make tensors in a step, the families in which they do, and why.
MAKERS = {
    f"{CORE}.inference.engine": (EVERY, "the step's numbers, brought to the device in one copy"),
    f"{CORE}.ops.paged_attention.reference": (EVERY, "on a CPU in place of a kernel"),
    f"{CORE}.moe.dispatch": ({"experts"}, "counts of experts, which begin at zero"),
    f"{CORE}.ops.permutation": ({"experts"}, "the order of rows, inverted"),
    f"{CORE}.ops.grouped_mm": ({"experts"}, "the result of several products"),
    f"{CORE}.ops.swiglu": ({"experts"}, "the result of an activation"),
    f"{CORE}.ops.rope": ({"latent"}, "the result of a rotation"),
    f"{CORE}.ops.causal_conv1d": ({"hybrid"}, "on a CPU in place of a kernel"),
    f"{CORE}.ops.gated_delta_rule": ({"hybrid"}, "on a CPU in place of a kernel"),
    f"{CORE}.ops.state_space_dual": ({"hybrid"}, "on a CPU in place of a kernel"),
    f"{CORE}.ops.gated_rms_norm": ({"hybrid"}, "the result of a norm"),
}


def expected(named: dict[str, tuple[set[str] | frozenset[str], str]], family: str) -> set[str]:
    return {module for module, (families, _) in named.items() if family in families}


def decoding(
    family: str, groups: ProcessGroupCollection | None = None, *, sequence_parallel: bool = False
) -> Engine:
    """Return an engine whose next steps only decode."""
    layout = {"sequence_parallel": True} if sequence_parallel else {}
    if family in OTHERS:
        config, dtype = OTHERS[family]
        groups = groups or ProcessGroupCollection.single()
        model = GPTModel(config, groups, dtype=dtype, seed=3, **layout)
    else:
        model = model_of(family, groups, **layout)
    multiple = model.region.group.size if sequence_parallel else 1
    engine = engine_of(model, max_num_batched_tokens=500, token_multiple=multiple)
    engine.model = InferenceOptimizedModel(model)
    for request in requests():
        engine.add(request)
    while any(row.num_new_tokens > 1 for row in engine._outputs):
        engine.step()
    engine.step()  # which makes buffers of this many tokens
    return engine


@pytest.mark.parametrize("family", GUARDED)
def test_decode_step_calls_reads_and_creates_only_listed_names(family: str) -> None:
    engine = decoding(family)
    found = Steps.of(engine.step)
    assert engine.unfinished == len(requests())
    assert not found.functions
    assert not found.collectives
    assert modules(found.reads) == expected(READERS, family), found.reads
    assert modules(found.makes) == expected(MAKERS, family), found.makes


def no_op(hidden: torch.Tensor) -> torch.Tensor:
    return Nothing.apply(hidden)


def no_op_of_the_base(hidden: torch.Tensor) -> torch.Tensor:
    return super(torch.autograd.Function, Nothing).apply(hidden)


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
    ("kind", "planted"), [(kind, one) for kind, each in PLANTED.items() for one in each]
)
def test_the_line_of_what_is_planted_is_named(kind: str, planted: Callable) -> None:
    engine = decoding("gqa")
    forward = engine.model

    def slower(tokens, **context):
        return planted(forward(tokens, **context))

    slower.head = forward.head
    engine.model = slower
    found = getattr(Steps.of(engine.step), kind)
    line = planted.__code__.co_firstlineno + 1
    assert f"{__name__}:{planted.__name__}:{line}" in found


class Nothing(torch.autograd.Function):
    """The no-op that a reduction over one rank used to be."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


#: Modules that make the results of collectives.
RESULTS = {f"{CORE}.comm.collectives"}
#: Families whose step is traced on two ranks, with its scatters and gathers. Each block has one of
#: both, latent attention three gathers; the embedding is scattered, the last hidden states and the
#: logits are gathered.
ON_RANKS = {"gqa": (5, 6), "experts": (5, 6), "latent": (5, 10), "hybrid": (7, 8)}
#: Each rank has half of the experts, whole; else a part of each.
WHOLE_EXPERTS = "whole experts"


def steps_on_a_rank(rank: int, world: int) -> dict[str, tuple[Steps, Counter[str]]]:
    parts = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    grid = RankGrid(world_size=world, tp=world, etp=1, ep=world)
    whole = ProcessGroupCollection.create(grid, rank=rank)
    found = {}
    with one_thread():
        for case in (*ON_RANKS, WHOLE_EXPERTS):
            family, groups = ("experts", whole) if case == WHOLE_EXPERTS else (case, parts)
            engine = decoding(family, groups, sequence_parallel=True)
            with trace(groups) as records:
                step = Steps.of(engine.step)
            collectives = Counter(record.kind for record in records)
            found[case] = step, collectives
    return found


def test_on_ranks_a_step_enters_only_its_gathers_and_scatters() -> None:
    for found in run_ranks(steps_on_a_rank, 2):
        for case, (step, collectives) in found.items():
            family = "experts" if case == WHOLE_EXPERTS else case
            assert not step.functions, case
            assert modules(step.reads) == expected(READERS, family), step.reads
            assert modules(step.makes) == expected(MAKERS, family) | RESULTS, step.makes
            kinds = collectives["reduce_scatter"], collectives["all_gather"]
            assert kinds == ON_RANKS[family], (family, collectives)
