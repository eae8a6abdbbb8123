# SPDX-License-Identifier: Apache-2.0
"""Decode steps of recurrent layers on the GPU: against fp64, and in a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

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
from megatron.core.ops.recurrence.decode import triton as recurrence_decode_triton
from tests.support.closeness import relative_error
from tests.support.gpu_agreement import BOUND, DTYPES, REHEARSES, random_tensor, sized
from tests.support.launch_kernels import assert_launches
from tests.support.nan_memory import nan_memory

pytestmark = pytest.mark.gpu

ROWS, STEPS = sized((77, 40), (3, 2))
LIMITS = (0.0, 1.0)
#: Units of a layer and their layout: of Qwen3-Next, Nemotron-H, mamba2-2.7b, and uneven sizes.
LAYERS = sized(
    {
        "Qwen3-Next": (16, UnitLayout.delta(2, 128, 128)),
        "Nemotron-H": (8, UnitLayout.state_space(16, 128, 64, LIMITS)),
        "Mamba-2": (1, UnitLayout.state_space(80, 128, 64, LIMITS)),
        "odd": (3, UnitLayout.delta(3, 100, 52)),
        "wide": (2, UnitLayout.delta(2, 256, 128)),
    },
    {
        "delta": (2, UnitLayout.delta(2, 6, 5)),
        "state space": (1, UnitLayout.state_space(4, 5, 3, LIMITS)),
    },
)


@dataclass(frozen=True)
class Layer:
    """A layer's weights and states."""

    unit: UnitLayout
    weights: PrologueWeights
    memory: DecodeMemory
    scale: torch.Tensor
    skip: torch.Tensor

    @staticmethod
    def of(device: torch.device, name: str, dtype: torch.dtype, *, bf16_states=False) -> Layer:
        units, unit = LAYERS[name]
        heads, channels = units * unit.heads, unit.conv_channels
        slots = torch.randperm(ROWS + 5, device=device)[:ROWS]
        slots[1] = -1
        states = (ROWS + 6, heads, unit.key_channels, unit.value_channels)
        conv = random_tensor(device, ROWS + 6, 3, units, channels).to(dtype)
        state = random_tensor(device, *states).to(torch.bfloat16 if bf16_states else torch.float32)
        state[-1], conv[-1] = torch.nan, torch.nan
        arrived = torch.zeros(ROWS + 6, units, dtype=torch.int32, device=device)
        return Layer(
            unit,
            PrologueWeights(
                (random_tensor(device, units, channels, 4) / 2).to(dtype),
                random_tensor(device, units, channels).to(dtype),
                random_tensor(device, heads) / 2,
                random_tensor(device, heads + 1)[1:],
            ),
            DecodeMemory(conv, state, slots, arrived),
            1 + random_tensor(device, heads * unit.value_channels) / 4,
            random_tensor(device, heads),
        )

    def to_fp64(self) -> Layer:
        """Return a copy in fp64."""
        weights = PrologueWeights(*(w.double() for w in self.weights))
        memory = replace(
            self.memory,
            conv=self.memory.conv.double(),
            state=self.memory.state.double(),
            slots=self.memory.slots,
        )
        return Layer(self.unit, weights, memory, self.scale.double(), self.skip.double())

    def step(self, features: torch.Tensor, implementation: str | None, order: str) -> torch.Tensor:
        """Decode one token of every row."""
        unit, delta = self.unit, self.unit.beta is not None
        values = unit.heads * unit.value_channels
        source, gate = features.split([unit.width, values], dim=-1)
        scale = self.scale[: unit.value_channels] if delta else self.scale
        size = None if delta else values
        return recurrence_decode(
            source,
            self.weights,
            unit=unit,
            memory=self.memory,
            skip=None if delta else self.skip,
            norm=OutputNorm(gate, scale, 1e-5, order, size),
            implementation=implementation,
        )


def features_of(device: torch.device, name: str, dtype: torch.dtype, step: int) -> torch.Tensor:
    units, unit = LAYERS[name]
    width = unit.width + unit.heads * unit.value_channels
    return torch.roll(random_tensor(device, ROWS, units, width), step, 0).to(dtype)


def assert_steps_agree(layer: Layer, name: str, dtype: torch.dtype, order: str, steps: int) -> None:
    """Decode tokens with kernel and reference; compare every output and the final states."""
    true, device = layer.to_fp64(), layer.scale.device
    for step in range(steps):
        features = features_of(device, name, dtype, step)
        features[1] = torch.nan  # slot -1
        with nan_memory():
            actual = layer.step(features, "triton", order)
        expected = true.step(features.double(), "reference", order)
        assert relative_error(actual, expected) <= BOUND[dtype], step
        assert not actual[1].any()
    bound = BOUND[layer.memory.state.dtype]
    assert relative_error(layer.memory.state[:-1], true.memory.state[:-1]) <= bound
    assert torch.equal(layer.memory.conv[:-1].double(), true.memory.conv[:-1]), "rows are copied"
    assert layer.memory.conv[-1].isnan().all()
    assert not layer.memory.arrival_counts.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])
@pytest.mark.parametrize("name", LAYERS)
def test_decode_steps_match_fp64_reference(device, dtype, order, name):
    layer = Layer.of(device, name, dtype)
    assert_steps_agree(layer, name, dtype, order, STEPS)


@pytest.mark.parametrize("name", LAYERS)
def test_nan_steps_propagate(device, name):
    """On a GPU, the maximum of a number and NaN is the number."""
    layer = Layer.of(device, name, DTYPES[-1])
    features = features_of(device, name, DTYPES[-1], 0)
    features[0, 0, layer.unit.dt] = torch.nan
    layer.step(features, "triton", NORM_FIRST)
    state = layer.memory.state[layer.memory.slots[0]]
    assert state[0].isnan().all()
    assert state[1:].isfinite().all()


@pytest.mark.parametrize("name", LAYERS)
def test_every_launch_candidate_matches_reference(device, name, monkeypatch):
    candidates = recurrence_decode_triton.DECODE.candidates
    for launch in candidates[-2:] if REHEARSES else candidates:
        monkeypatch.setattr(
            recurrence_decode_triton, "DECODE", Launches("recurrence_decode", launch)
        )
        layer = Layer.of(device, name, torch.float32)
        assert_steps_agree(layer, name, torch.float32, GATE_FIRST, 2)


@pytest.mark.machine  # the interpreter rounds to bf16 by truncating
def test_bf16_states_match_fp64_reference(device):
    name = next(iter(LAYERS))
    layer = Layer.of(device, name, torch.bfloat16, bf16_states=True)
    assert_steps_agree(layer, name, torch.bfloat16, NORM_FIRST, 2)


@pytest.mark.parametrize("name", LAYERS)
def test_decode_step_is_one_kernel(device, name):
    layer = Layer.of(device, name, DTYPES[-1])
    features = features_of(device, name, DTYPES[-1], 0)
    assert_launches(
        lambda: layer.step(features, "triton", GATE_FIRST), {"recurrence_decode_kernel": 1}
    )


@pytest.mark.machine
@pytest.mark.parametrize("name", LAYERS)
def test_graph_replay_reads_updated_slots_and_tokens(device, name):
    """A replay reads the current contents of its buffers, like the engine's."""
    layer = Layer.of(device, name, torch.bfloat16)
    features = features_of(device, name, torch.bfloat16, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.step(features, None, NORM_FIRST)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.step(features, None, NORM_FIRST)
    memory = layer.memory
    eager = replace(
        layer, memory=replace(memory, conv=memory.conv.clone(), state=memory.state.clone())
    )
    for step in range(1, 6):
        features.copy_(features_of(device, name, torch.bfloat16, step))
        memory.slots.copy_(memory.slots.roll(3))
        graph.replay()
        expected = eager.step(features, None, NORM_FIRST)
        assert torch.equal(y, expected)
    assert torch.equal(memory.state[:-1], eager.memory.state[:-1])
    assert torch.equal(memory.conv[:-1], eager.memory.conv[:-1])
