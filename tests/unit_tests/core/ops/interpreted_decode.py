# SPDX-License-Identifier: Apache-2.0
"""The recurrence decode kernel in Triton's interpreter against the reference in fp64.

`test_triton.py` runs this file in a separate process, because TRITON_INTERPRET must be set before
the first import of Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from megatron.core import InitSpec, ProcessGroupCollection
from megatron.core.backend import LOCAL
from megatron.core.context_parallel import ContextParallel, SequenceLayout
from megatron.core.distributed import DataParallelConfig
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import (
    GATE_FIRST,
    NORM_FIRST,
    DecodeMemory,
    OutputNorm,
    PrologueWeights,
    UnitLayout,
    recurrence_decode,
)
from megatron.core.ops.recurrence import decode as recurrence_decode_op
from megatron.core.ops.recurrence.decode import triton as recurrence_decode_triton
from megatron.core.ssm import GatedDeltaNet, GatedDeltaNetConfig, Mamba2, Mamba2Config
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import LayerBuild, NormConfig
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import relative_error
from tests.support.inputs import generator
from tests.support.launch_kernels import assert_launches
from tests.support.nan_memory import nan_memory
from tests.support.paged_steps import PagedSteps

ROWS, SLOTS, UNITS = 3, 5, 2
#: State slots of the rows of a permuted batch; -1 is a row without a token.
ROW_SLOTS = (3, -1, 1)


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@dataclass(frozen=True)
class Call:
    """Arguments of one call in fp64.

    Args:
        source: [b, u, w + rV], features followed by the gate.
        weights, unit, skip, norm: as of `recurrence_decode`; the norm has an empty gate.
        memory: states before the call.
    """

    source: torch.Tensor
    weights: PrologueWeights
    unit: UnitLayout
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
        """Run the call on copies in `dtype`; return (y, memory after the call)."""
        unit, before = self.unit, self.memory
        source, gate = self.source.to(dtype).split(
            [unit.width, unit.heads * unit.value_channels], dim=-1
        )
        norm = self.norm and replace(self.norm, gate=gate, weight=self.norm.weight.to(dtype))
        memory = DecodeMemory(
            before.conv.to(dtype, copy=True),
            before.state.to(states or dtype, copy=True),
            before.slots,
            counts(before.slots) if arrived else None,
        )
        y = recurrence_decode(
            source,
            PrologueWeights(*(None if w is None else w.to(dtype) for w in self.weights)),
            unit=unit,
            memory=memory,
            skip=None if self.skip is None else self.skip.to(dtype),
            norm=norm,
            implementation=implementation,
        )
        return y, memory


def counts(slots: torch.Tensor) -> torch.Tensor:
    """Return arrival counts: zero for these slots, and 7 for unused ones."""
    arrival_counts = torch.full((SLOTS, UNITS), 7, dtype=torch.int32)
    arrival_counts[slots[slots >= 0]] = 0
    return arrival_counts


def make_call(
    unit: UnitLayout,
    *,
    width: int = 4,
    bias: bool = False,
    skip: bool = False,
    order: str = NORM_FIRST,
    shared: bool = False,
    group_size: int | None = None,
) -> Call:
    """Return a call with random arguments; `group_size` 0 means no norm."""
    generator = torch.Generator().manual_seed(11)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, c = UNITS * unit.heads, unit.conv_channels
    features = unit.value_channels * (1 if shared else heads)
    norm = OutputNorm(make(0), 1 + make(features) / 3, 1e-5, order, group_size)
    source = make(ROWS, UNITS, unit.width + unit.heads * unit.value_channels)
    source[..., unit.dt] -= 6.0  # steps as small as trained ones
    source[1] = torch.nan  # slot -1
    memory = DecodeMemory(
        make(SLOTS, width - 1, UNITS, c),
        make(SLOTS, heads, unit.key_channels, unit.value_channels),
        torch.tensor(ROW_SLOTS),
    )
    for states in (memory.conv, memory.state):
        states[SLOTS - 1] = torch.nan  # the unused slot
    return Call(
        source,
        PrologueWeights(
            make(UNITS, c, width), make(UNITS, c) if bias else None, make(heads) / 2, make(heads)
        ),
        unit,
        memory,
        make(heads) if skip else None,
        None if group_size == 0 else norm,
    )


def assert_matches_reference(call: Call, **options) -> None:
    """Compare the output and the states with the reference in fp64."""
    actual, memory = call.run("triton", torch.float32, **options)
    expected, expected_memory = call.run("reference", torch.float64)
    assert relative_error(actual, expected) < 1e-5
    assert not actual[1].any()
    for name in ("conv", "state"):
        state, state_before = getattr(memory, name), getattr(call.memory, name).float()
        bound = 1e-5 if state.dtype == torch.float32 else 2**-7
        assert relative_error(state[:-1], getattr(expected_memory, name)[:-1]) < bound
        for slot in {*range(SLOTS - 1)} - {*ROW_SLOTS}:
            assert torch.equal(state[slot].float(), state_before[slot].to(state.dtype).float())
        for slot in {*ROW_SLOTS} - {-1}:
            assert state[slot].numel() == 0 or not torch.equal(
                state[slot].float(), state_before[slot]
            )
        assert state[-1].isnan().all()
    if memory.arrival_counts is not None:
        assert torch.equal(memory.arrival_counts, counts(memory.slots)), (
            "the kernel must reset the counts for the next call"
        )


DELTA_RULE = UnitLayout.delta(3, 10, 6)
STATE_SPACE = UnitLayout.state_space(4, 5, 7, (0.01, 0.5))


@pytest.mark.parametrize(("heads", "order"), [(1, NORM_FIRST), (3, GATE_FIRST)])
def test_delta_rule_with_head_norm_matches_fp64(heads, order, monkeypatch):
    set_heads_per_program(monkeypatch, heads)
    assert_matches_reference(make_call(DELTA_RULE, shared=True, order=order))


@pytest.mark.parametrize(
    ("heads", "order"), [(1, NORM_FIRST), (1, GATE_FIRST), (2, GATE_FIRST), (4, NORM_FIRST)]
)
def test_state_space_with_unit_norm_matches_fp64(heads, order, monkeypatch):
    set_heads_per_program(monkeypatch, heads)
    monkeypatch.setattr(recurrence_decode_triton, "NORM_BLOCK", 16)  # less than a unit
    assert_matches_reference(
        make_call(STATE_SPACE, bias=True, skip=True, order=order, group_size=4 * 7)
    )


@pytest.mark.parametrize("group_size", [7, 14, 2 * 4 * 7, 0])
def test_norm_group_sizes_match_fp64(group_size, monkeypatch):
    set_heads_per_program(monkeypatch, 2)
    call = make_call(STATE_SPACE, skip=True, order=GATE_FIRST, group_size=group_size)
    assert_matches_reference(call)


@pytest.mark.parametrize("width", [1, 2, 6])
def test_convolution_widths_match_fp64(width, monkeypatch):
    set_heads_per_program(monkeypatch, 3)
    assert_matches_reference(make_call(DELTA_RULE, width=width, bias=True, shared=True))


def test_single_head_units_and_missing_counts_match_fp64():
    assert_matches_reference(make_call(UnitLayout.delta(1, 16, 8), group_size=8))
    assert_matches_reference(
        make_call(STATE_SPACE, bias=True, skip=True, group_size=28), arrived=False
    )


def test_small_step_sizes_are_precise():
    call = make_call(replace(STATE_SPACE, dt_limit=(0.0, 1.0)), group_size=0)
    call.source[..., STATE_SPACE.dt :] -= 9.0
    call.memory.state[:-1] = 0.0  # so the output is proportional to the step size
    assert_matches_reference(call)


def test_bf16_states_are_rounded():
    """The interpreter truncates to bf16."""
    call = make_call(DELTA_RULE, shared=True)
    call.memory.state.copy_(call.memory.state.bfloat16())
    assert_matches_reference(call, states=torch.bfloat16)


def test_padding_batch_changes_no_state():
    call = make_call(DELTA_RULE, shared=True)
    memory = replace(call.memory, slots=torch.full((ROWS,), -1))
    y, memory_after = replace(call, memory=memory).run("triton", torch.float32)
    assert not y.any()
    assert torch.equal(memory_after.state[:-1], memory.state[:-1].float())
    assert torch.equal(memory_after.conv[:-1], memory.conv[:-1].float())


def test_too_large_state_is_refused():
    call = make_call(UnitLayout.delta(1, 257, 65), shared=True)
    with pytest.raises(ValueError, match=r"257 x 65.*use implementation='reference'"):
        call.run("triton", torch.float32)


HIDDEN, PROMPT = 8, 4
#: The rows with a token in each decode step after the prompt.
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
    "mamba with one norm group": (
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
    expected = layer(hidden, SequenceLayout.of_rows(count))
    paged_steps = PagedSteps(layer.cache_shapes(torch.float32), rows=3, length=count)
    out = torch.zeros(count, 3, HIDDEN)

    def feed(counts: Sequence[int]) -> None:
        layout = paged_steps.layout(counts)
        packed = paged_steps.packed(hidden)[:, None]
        paged_steps.unpacked(layer(packed, layout, cache=paged_steps.cache)[:, 0], out)

    feed([PROMPT] * 3)
    calls = []

    def chosen(*_):
        calls.append(kind)
        return "triton"

    monkeypatch.setattr(recurrence_decode_op, "_implementation", chosen)
    for step in STEPS:
        feed([int(count) for count in step])
    assert paged_steps.num_fed == [PROMPT + 2] * 3
    assert relative_error(out[: PROMPT + 2], expected[: PROMPT + 2]) < 1e-5
    assert len(calls) >= len(STEPS)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
@torch.no_grad()
def test_decode_launches_one_kernel_between_projections(kind, monkeypatch):
    monkeypatch.setattr(recurrence_decode_op, "_implementation", lambda *_: "triton")
    layer = layer_of(kind)
    paged_steps = PagedSteps(layer.cache_shapes(torch.float32), rows=2, length=9)
    layout = paged_steps.layout([1, 1])
    hidden = torch.randn(2, 1, HIDDEN, generator=generator(5))
    projections = {"input": layer.input(hidden), "output": hidden}
    for name, projection in projections.items():
        monkeypatch.setattr(
            getattr(layer, name), "forward", lambda _, projection=projection: projection
        )
    assert_launches(
        lambda: layer(hidden, layout, cache=paged_steps.cache), {"recurrence_decode_kernel": 1}
    )


def set_heads_per_program(monkeypatch, heads: int) -> None:
    """Set the number of heads per program."""
    launch = Launches("recurrence_decode", {"HEADS": heads, "num_warps": 1, "num_stages": 1})
    monkeypatch.setattr(recurrence_decode_triton, "DECODE", launch)
