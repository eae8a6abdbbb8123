# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of one more token in Triton's interpreter against the ops in fp64.

Run by `test_triton.py` in a process of its own: TRITON_INTERPRET must be set before the first
import of Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.layout import ContextParallel
from megatron.core.distributed import DataParallelConfig
from megatron.core.inference.cache import CacheShapes
from megatron.core.initialize import InitSpec
from megatron.core.ops import recurrence_decode as recurrence_decode_op
from megatron.core.ops.gated_rms_norm import GATE_FIRST, NORM_FIRST
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence_decode import recurrence_decode
from megatron.core.ops.recurrence_decode import triton as recurrence_decode_triton
from megatron.core.ops.recurrence_decode.reference import DecodeMemory, OutputNorm
from megatron.core.ops.recurrence_prologue import PrologueWeights, UnitLayout
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba2 import Mamba2
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, Mamba2Config
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import LayerBuild, NormConfig
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import relative_error
from tests.support.inputs import generator
from tests.support.launch_kernels import assert_launches
from tests.support.nan_memory import nan_memory
from tests.support.paged_steps import PagedSteps

ROWS, SLOTS, UNITS = 3, 5, 2
#: Of a permuted batch, with rows without a token.
PLACES = (3, -1, 1)


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@dataclass(frozen=True)
class Call:
    """What one call is given, in fp64.

    Args:
        source: [b, u, w + rV], features and behind them the gate.
        weights, parts, skip, norm: as of `recurrence_decode`; the gate of the norm is nothing.
        memory: before the call.
    """

    source: torch.Tensor
    weights: PrologueWeights
    parts: UnitLayout
    memory: DecodeMemory
    skip: torch.Tensor | None
    norm: OutputNorm | None

    def run(
        self,
        implementation: str,
        dtype: torch.dtype,
        *,
        states: torch.dtype | None = None,
        arrived: bool = True,
    ) -> tuple[torch.Tensor, DecodeMemory]:
        """Return (y, what is kept behind the call) of copies in `dtype`."""
        parts, kept = self.parts, self.memory
        source, gate = self.source.to(dtype).split(
            [parts.width, parts.heads * parts.value_channels], dim=-1
        )
        norm = self.norm and replace(self.norm, gate=gate, weight=self.norm.weight.to(dtype))
        memory = DecodeMemory(
            kept.conv.to(dtype, copy=True),
            kept.state.to(states or dtype, copy=True),
            kept.slots,
            counts(kept.slots) if arrived else None,
        )
        y = recurrence_decode(
            source,
            PrologueWeights(*(None if w is None else w.to(dtype) for w in self.weights)),
            unit=parts,
            memory=memory,
            skip=None if self.skip is None else self.skip.to(dtype),
            norm=norm,
            implementation=implementation,
        )
        return y, memory


def counts(slots: torch.Tensor) -> torch.Tensor:
    """Return zeros where programs of these slots count, and elsewhere numbers in their way."""
    found = torch.full((SLOTS, UNITS), 7, dtype=torch.int32)
    found[slots[slots >= 0]] = 0
    return found


def called(
    parts: UnitLayout,
    *,
    width: int = 4,
    bias: bool = False,
    skip: bool = False,
    order: str = NORM_FIRST,
    shared: bool = False,
    group_size: int | None = None,
) -> Call:
    """Return a call with numbers in everything; `group_size` 0 is without a norm."""
    generator = torch.Generator().manual_seed(11)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, c = UNITS * parts.heads, parts.conv_channels
    features = parts.value_channels * (1 if shared else heads)
    norm = OutputNorm(make(0), 1 + make(features) / 3, 1e-5, order, group_size)
    source = make(ROWS, UNITS, parts.width + parts.heads * parts.value_channels)
    source[..., parts.dt] -= 6.0  # steps as small as trained ones
    source[1] = torch.nan  # slot -1
    memory = DecodeMemory(
        make(SLOTS, width - 1, UNITS, c),
        make(SLOTS, heads, parts.key_channels, parts.value_channels),
        torch.tensor(PLACES),
    )
    for kept in (memory.conv, memory.state):
        kept[SLOTS - 1] = torch.nan  # nobody's
    return Call(
        source,
        PrologueWeights(
            make(UNITS, c, width), make(UNITS, c) if bias else None, make(heads) / 2, make(heads)
        ),
        parts,
        memory,
        make(heads) if skip else None,
        None if group_size == 0 else norm,
    )


def assert_agrees(call: Call, **options) -> None:
    """Compare the output and all that is kept with the reference in fp64."""
    mine, kept = call.run("triton", torch.float32, **options)
    true, wanted = call.run("reference", torch.float64)
    assert relative_error(mine, true) < 1e-5
    assert not mine[1].any()
    for name in ("conv", "state"):
        after, before = getattr(kept, name), getattr(call.memory, name).float()
        bound = 1e-5 if after.dtype == torch.float32 else 2**-7
        assert relative_error(after[:-1], getattr(wanted, name)[:-1]) < bound
        for slot in {*range(SLOTS - 1)} - {*PLACES}:
            assert torch.equal(after[slot].float(), before[slot].to(after.dtype).float())
        for slot in {*PLACES} - {-1}:
            assert after[slot].numel() == 0 or not torch.equal(after[slot].float(), before[slot])
        assert after[-1].isnan().all()
    if kept.arrival_counts is not None:
        assert torch.equal(kept.arrival_counts, counts(kept.slots)), "the next call counts wrongly"


DELTA = UnitLayout.delta(3, 10, 6)
SPACE = UnitLayout.state_space(4, 5, 7, (0.01, 0.5))


@pytest.mark.parametrize(("heads", "order"), [(1, NORM_FIRST), (3, GATE_FIRST)])
def test_delta_rule_with_a_norm_over_a_head(heads, order, monkeypatch):
    programs_of(monkeypatch, heads)
    assert_agrees(called(DELTA, shared=True, order=order))


@pytest.mark.parametrize(
    ("heads", "order"), [(1, NORM_FIRST), (1, GATE_FIRST), (2, GATE_FIRST), (4, NORM_FIRST)]
)
def test_state_space_with_a_norm_over_a_unit(heads, order, monkeypatch):
    programs_of(monkeypatch, heads)
    monkeypatch.setattr(recurrence_decode_triton, "NORM_BLOCK", 16)  # fewer than a unit has
    assert_agrees(called(SPACE, bias=True, skip=True, order=order, group_size=4 * 7))


@pytest.mark.parametrize("group_size", [7, 14, 2 * 4 * 7, 0])
def test_norms_over_heads_parts_of_units_and_all_units_or_none(group_size, monkeypatch):
    programs_of(monkeypatch, 2)
    call = called(SPACE, skip=True, order=GATE_FIRST, group_size=group_size)
    assert_agrees(call)


@pytest.mark.parametrize("width", [1, 2, 6])
def test_widths_of_the_convolution(width, monkeypatch):
    programs_of(monkeypatch, 3)
    assert_agrees(called(DELTA, width=width, bias=True, shared=True))


def test_one_head_a_unit_and_no_counters():
    assert_agrees(called(UnitLayout.delta(1, 16, 8), group_size=8))
    assert_agrees(called(SPACE, bias=True, skip=True, group_size=28), arrived=False)


def test_small_steps_are_as_precise_as_large_ones():
    call = called(replace(SPACE, dt_limit=(0.0, 1.0)), group_size=0)
    call.source[..., SPACE.dt :] -= 9.0
    call.memory.state[:-1] = 0.0  # so that all that comes out is times a step
    assert_agrees(call)


def test_states_of_fewer_bits_are_rounded():
    """To bf16, which the interpreter truncates to."""
    call = called(DELTA, shared=True)
    call.memory.state.copy_(call.memory.state.bfloat16())
    assert_agrees(call, states=torch.bfloat16)


def test_a_batch_without_tokens_touches_nothing():
    call = called(DELTA, shared=True)
    memory = replace(call.memory, slots=torch.full((ROWS,), -1))
    y, kept = replace(call, memory=memory).run("triton", torch.float32)
    assert not y.any()
    assert torch.equal(kept.state[:-1], memory.state[:-1].float())
    assert torch.equal(kept.conv[:-1], memory.conv[:-1].float())


def test_a_state_that_no_program_holds_is_refused():
    call = called(UnitLayout.delta(1, 257, 65), shared=True)
    with pytest.raises(ValueError, match=r"257 x 65.*use implementation='reference'"):
        call.run("triton", torch.float32)


HIDDEN, PROMPT = 8, 4
#: Which of three rows have a token, call after call behind the prompt.
STEPS = ((1, 1, 1), (1, 0, 1), (0, 1, 0))
MIXERS = {
    "delta": (
        GatedDeltaNet,
        GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_channels=5, value_channels=3),
    ),
    "mamba": (
        Mamba2,
        Mamba2Config(num_heads=4, head_channels=3, state_channels=5, num_groups=2),
    ),
    "mamba in one norm": (
        Mamba2,
        Mamba2Config(
            num_heads=2, head_channels=3, state_channels=5, num_groups=2, norm_groups=1, bias=True
        ),
    ),
}


def layer_of(kind: str) -> RecurrentMixer:
    groups = ProcessGroupCollection.single()
    layer_class, config = MIXERS[kind]
    store = WeightStore(groups, seed=2, dtype=torch.float32)
    build = LayerBuild(
        store=store,
        region=TensorParallelRegion(groups["tp"], False),
        backend=LOCAL,
        hidden_size=HIDDEN,
        init=InitSpec.normal(0.5),
        output_init=InitSpec.normal(0.4),
        context=ContextParallel(group=groups["cp"]),
    )
    with store.unit("m"):
        layer = layer_class("m", config=config, norm=NormConfig(), build=build)
    store.materialize(DataParallelConfig().storage())
    return layer


@pytest.mark.parametrize("kind", MIXERS)
@torch.no_grad()
def test_prefill_and_decode_of_layer_match_whole_sequence(kind, monkeypatch):
    layer, count = layer_of(kind), PROMPT + len(STEPS)
    hidden = torch.randn(count, 3, HIDDEN, generator=generator(4))
    whole = layer(hidden, SequenceLayout.of_rows(count))
    fed = PagedSteps(CacheShapes.from_modules([layer], torch.float32), rows=3, length=count)
    out = torch.zeros(count, 3, HIDDEN)

    def feed(counts: Sequence[int]) -> None:
        layout = fed.layout(counts)
        packed = fed.packed(hidden)[:, None]
        fed.unpacked(layer(packed, layout, cache=fed.cache)[:, 0], out)

    feed([PROMPT] * 3)
    calls = []

    def chosen(*_):
        calls.append(kind)
        return "triton"

    monkeypatch.setattr(recurrence_decode_op, "_implementation", chosen)
    for step in STEPS:
        feed([int(one) for one in step])
    assert fed.num_fed == [PROMPT + 2] * 3
    assert relative_error(out[: PROMPT + 2], whole[: PROMPT + 2]) < 1e-5
    assert len(calls) >= len(STEPS)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
@torch.no_grad()
def test_between_projections_there_is_one_kernel(kind, monkeypatch):
    monkeypatch.setattr(recurrence_decode_op, "_implementation", lambda *_: "triton")
    layer = layer_of(kind)
    fed = PagedSteps(CacheShapes.from_modules([layer], torch.float32), rows=2, length=9)
    layout = fed.layout([1, 1])
    hidden = torch.randn(2, 1, HIDDEN, generator=generator(5))
    projections = {"input": layer.input(hidden), "output": hidden}
    for name, found in projections.items():
        monkeypatch.setattr(getattr(layer, name), "forward", lambda _, found=found: found)
    assert_launches(lambda: layer(hidden, layout, cache=fed.cache), {"recurrence_decode_kernel": 1})


def programs_of(monkeypatch, heads: int) -> None:
    """Let a program do so many heads."""
    launch = Launches("recurrence_decode", {"HEADS": heads, "num_warps": 1, "num_stages": 1})
    monkeypatch.setattr(recurrence_decode_triton, "DECODE", launch)
