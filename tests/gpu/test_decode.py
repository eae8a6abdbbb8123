# SPDX-License-Identifier: Apache-2.0
"""Decode steps of recurrent layers: against whole sequences, as kernels, and in a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import (
    GATE_FIRST,
    NORM_FIRST,
    DecodeMemory,
    OutputNorm,
    PrologueWeights,
    UnitLayout,
    naive,
    recurrence_decode,
)
from megatron.core.ops.recurrence import decode as recurrence_decode_op
from megatron.core.ops.sequences import Sequences
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.gpu_agreement import (
    BOUND,
    CPU_BOUND,
    DTYPES,
    REHEARSES,
    assert_refused,
    sized,
)
from tests.support.inputs import generator
from tests.support.launch_kernels import assert_launches
from tests.support.layers import make_mixer
from tests.support.nan_memory import nan_memory
from tests.support.paged_steps import PagedSteps

KERNELS = pytest.mark.gpu


# --- plain torch: decoding against the equations over whole sequences

UNITS, SLOTS, LENGTH = 2, 6, 5
#: The state slots of three sequences, and the sequences in each batch; None is a padding row.
SEQUENCE_SLOTS = (4, 0, 2)
BATCHES = ((0, None, 1, 2), (2, 0, 1), (1, None, 0, None), (2, 1), (0, 2), (None,), (1, 0, None))
LAYOUTS = {
    "delta": UnitLayout.delta(3, 4, 5),
    "space": UnitLayout.state_space(3, 4, 5, (0.01, 0.9)),
}
KINDS = pytest.mark.parametrize("kind", LAYOUTS)


@pytest.fixture
def make():
    """Draw fp64 tensors from one seed."""
    source = generator(1234)
    return lambda *shape: torch.randn(shape, generator=source, dtype=torch.float64)


def weights_of(layout: UnitLayout, make, *, width: int = 4) -> PrologueWeights:
    heads = UNITS * layout.heads
    rates = make(heads) / 2 - 1
    return PrologueWeights(
        make(UNITS, layout.conv_channels, width),
        make(UNITS, layout.conv_channels),
        rates,
        make(heads),
    )


def memory_of(layout: UnitLayout, slots: list[int], *, width: int = 4) -> DecodeMemory:
    """Return zero states for new sequences and NaN in the unused slot."""
    heads = UNITS * layout.heads
    fp64 = {"dtype": torch.float64}
    conv = torch.zeros(SLOTS, width - 1, UNITS, layout.conv_channels, **fp64)
    state = torch.zeros(SLOTS, heads, layout.key_channels, layout.value_channels, **fp64)
    conv[-1], state[-1] = math.nan, math.nan
    return DecodeMemory(conv, state, torch.tensor(slots))


@KINDS
@pytest.mark.parametrize("width", [1, 4])
def test_decode_matches_whole_sequences(make, kind: str, width: int) -> None:
    layout = LAYOUTS[kind]
    heads, values = UNITS * layout.heads, layout.heads * layout.value_channels
    weights, scales, skip = weights_of(layout, make, width=width), make(heads * 5), make(heads)
    sources = make(3, LENGTH, UNITS, layout.width + values)  # of three sequences
    expected = []
    for source in sources:
        features, gate = source.split([layout.width, values], dim=-1)
        sequences = Sequences([0, LENGTH])
        inputs, _ = naive.prologue(features, weights, unit=layout, sequences=sequences)
        equation = naive.delta_rule if kind == "delta" else naive.ssd
        out, _ = naive.recur(equation, inputs, sequences)
        out = out + skip[:, None] * inputs.value
        options = {"eps": 1e-5, "order": GATE_FIRST, "group_size": values}
        expected.append(naive.gated_rms_norm(out.flatten(1), gate.flatten(1), scales, **options))
    memory, num_decoded = memory_of(layout, [], width=width), [0, 0, 0]
    padding = torch.full_like(sources[0, 0], math.nan)
    for rows in BATCHES:
        slots = torch.tensor([-1 if row is None else SEQUENCE_SLOTS[row] for row in rows])
        tokens = [padding if row is None else sources[row, num_decoded[row]] for row in rows]
        features, gate = torch.stack(tokens).split([layout.width, values], dim=-1)
        with nan_memory():
            y = recurrence_decode(
                features,
                weights,
                unit=layout,
                memory=replace(memory, slots=slots),
                skip=skip,
                norm=OutputNorm(gate, scales, 1e-5, GATE_FIRST, values),
            )
        for row, actual in zip(rows, y.flatten(1), strict=True):
            if row is None:
                assert not actual.any()
            else:
                assert relative_error(actual, expected[row][num_decoded[row]]) < 1e-12
                num_decoded[row] += 1
    assert num_decoded == [LENGTH, LENGTH, LENGTH - 1]
    for states in (memory.conv, memory.state):
        assert states[-1].isnan().all()
        assert not states[[1, 3]].any()


@KINDS
def test_head_norms_share_one_weight_and_norm_is_optional(make, kind: str) -> None:
    layout = LAYOUTS[kind]
    weights, values = weights_of(layout, make), layout.heads * layout.value_channels
    source, gate, scale = make(2, UNITS, layout.width), make(2, UNITS, values), make(5)
    call = {"unit": layout}
    out = recurrence_decode(source, weights, memory=memory_of(layout, [1, 0]), **call)
    norm = OutputNorm(gate, scale, 1e-6)
    y = recurrence_decode(source, weights, memory=memory_of(layout, [1, 0]), norm=norm, **call)
    expected = naive.gated_rms_norm(out, gate.view(out.shape), scale, eps=1e-6)
    assert relative_error(y, expected) < 1e-12


def test_wrong_arguments_are_refused_in_one_line(make) -> None:
    layout = LAYOUTS["delta"]
    weights, memory = weights_of(layout, make), memory_of(layout, [1, 0])
    source = make(2, UNITS, layout.width)
    norm = OutputNorm(make(2, UNITS, 15), make(5), 1e-5)

    def refused(message: str, *, source=source, weights=weights, memory=memory, **options) -> None:
        options |= {"unit": layout, "memory": memory}
        assert_refused(lambda: recurrence_decode(source, weights, **options), message)

    refused(r"source \(2, 2, 28\)", source=source[..., 1:])
    refused(
        r"weight \(2, 22, 4\) must be \(2, 23, taps\)",
        weights=weights._replace(weight=weights.weight[:, 1:]),
    )
    refused(r"bias \(1, 23\)", weights=weights._replace(bias=weights.bias[1:]))
    refused(
        r"dt_bias \(5,\) must be \(6,\)",
        weights=weights._replace(dt_bias=weights.dt_bias[1:]),
    )
    refused(r"skip \(5,\) must be \(6,\)", skip=make(5))
    refused("state .* must be contiguous", memory=replace(memory, state=memory.state.mT))
    refused(r"conv \(6, 2, 2, 23\)", memory=replace(memory, conv=memory.conv[:, 1:]))
    counts = torch.zeros(SLOTS, UNITS)
    refused("arrival_counts is torch.float32", memory=replace(memory, arrival_counts=counts))
    refused("slots .* must be int64", memory=replace(memory, slots=memory.slots.int()))
    refused(r"gate \(2, 2, 14\)", norm=replace(norm, gate=norm.gate[..., 1:]))
    refused(
        r"weight \(4,\) must be one of \[\(5,\), \(30,\)\]",
        norm=replace(norm, weight=norm.weight[1:]),
    )
    refused("group_size 2 must divide", norm=replace(norm, group_size=2))
    refused("eps=-1", norm=replace(norm, eps=-1.0))
    refused("order='last'", norm=replace(norm, order="last"))
    refused("has no float64", implementation="triton")


# --- kernels against plain torch in fp64

LIMITS = (0.0, 1.0)
ROWS, STEPS = sized((77, 40), (3, 2))
DELTA, STATE_SPACE = UnitLayout.delta(3, 10, 6), UnitLayout.state_space(4, 5, 7, (0.01, 0.5))
#: Units of a layer and their layout: of Qwen3-Next, Nemotron-H, mamba2-2.7b, and uneven sizes.
MODELS = sized(
    {
        "Qwen3-Next": (16, UnitLayout.delta(2, 128, 128)),
        "Nemotron-H": (8, UnitLayout.state_space(16, 128, 64, LIMITS)),
        "Mamba-2": (1, UnitLayout.state_space(80, 128, 64, LIMITS)),
        "odd": (3, UnitLayout.delta(3, 100, 52)),
        "wide": (2, UnitLayout.delta(2, 256, 128)),
    },
    {"delta": (2, DELTA), "state space": (2, STATE_SPACE)},
)
#: By name: layout, heads of a program in the interpreter, options of `Layer.of`.
CASES = {
    "delta": (DELTA, 1, {"shared": True}),
    "delta, gate first": (DELTA, 3, {"shared": True, "order": GATE_FIRST}),
    **{
        f"state space, {heads} heads, {order}": (
            STATE_SPACE,
            heads,
            {"bias": True, "skip": True, "order": order, "group_size": 28},
        )
        for heads, order in ((1, NORM_FIRST), (1, GATE_FIRST), (2, GATE_FIRST), (4, NORM_FIRST))
    },
    **{
        f"norm groups of {size}": (
            STATE_SPACE,
            2,
            {"skip": True, "order": GATE_FIRST, "group_size": size},
        )
        for size in (7, 14, 2 * 4 * 7, 0)
    },
    **{
        f"width {width}": (DELTA, 3, {"width": width, "bias": True, "shared": True})
        for width in (1, 2, 6)
    },
    "one head": (UnitLayout.delta(1, 16, 8), 1, {"group_size": 8}),
    "without counts": (
        STATE_SPACE,
        1,
        {"bias": True, "skip": True, "group_size": 28, "counts": False},
    ),
    "small steps": (replace(STATE_SPACE, dt_limit=LIMITS), 1, {"group_size": 0, "steps": -9.0}),
}


@dataclass(frozen=True)
class Layer:
    """A layer's weights and states.

    Args:
        units, unit: number and layout of units.
        weights, memory, skip: of `recurrence_decode`.
        norm: with an empty gate; None for none.
        shift: added to the step sizes before the softplus.
    """

    units: int
    unit: UnitLayout
    weights: PrologueWeights
    memory: DecodeMemory
    skip: torch.Tensor | None
    norm: OutputNorm | None
    shift: float

    @staticmethod
    def of(
        device: torch.device,
        dtype: torch.dtype,
        units: int,
        unit: UnitLayout,
        *,
        width: int = 4,
        bias: bool = False,
        skip: bool = False,
        order: str = NORM_FIRST,
        shared: bool = False,
        group_size: int | None = None,
        counts: bool = True,
        states: torch.dtype = torch.float32,
        steps: float = 0.0,
    ) -> Layer:
        """Return a layer with random weights and states; `group_size` 0 means no norm."""
        heads, channels, slots = units * unit.heads, unit.conv_channels, ROWS + 3
        source = generator(heads, width)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=source).to(device)

        features = unit.value_channels * (1 if shared else heads)
        norm = OutputNorm(random(0), 1 + random(features) / 4, 1e-5, order, group_size)
        rows = torch.randperm(slots - 1, generator=source)[:ROWS]
        rows[1] = -1
        arrived = torch.full((slots, units), 7, dtype=torch.int32)
        arrived[rows[rows >= 0]] = 0
        memory = DecodeMemory(
            random(slots, width - 1, units, channels).to(dtype),
            random(slots, heads, unit.key_channels, unit.value_channels).to(states),
            rows.to(device),
            arrived.to(device) if counts else None,
        )
        memory.conv[-1], memory.state[-1] = torch.nan, torch.nan
        if steps:  # the output is then proportional to the step size
            memory.state[:-1] = 0.0
        return Layer(
            units,
            unit,
            PrologueWeights(
                (random(units, channels, width) / 2).to(dtype),
                random(units, channels).to(dtype) if bias else None,
                random(heads) / 2,
                random(heads),
            ),
            memory,
            random(heads) if skip else None,
            None if group_size == 0 else norm,
            steps,
        )

    @staticmethod
    def of_model(device: torch.device, name: str, dtype: torch.dtype, **options) -> Layer:
        """Return a layer of a model, with the norm of its kind."""
        units, unit = MODELS[name]
        if unit.beta is not None:
            options = {"shared": True, **options}
        else:
            size = unit.heads * unit.value_channels
            options = {"skip": True, "bias": True, "group_size": size, **options}
        return Layer.of(device, dtype, units, unit, **options)

    def to_fp64(self) -> Layer:
        """Return a copy in fp64."""
        memory = replace(
            self.memory,
            conv=self.memory.conv.double(),
            state=self.memory.state.double(),
            slots=self.memory.slots,
        )
        return replace(
            self,
            weights=PrologueWeights(*(None if w is None else w.double() for w in self.weights)),
            memory=memory,
            skip=None if self.skip is None else self.skip.double(),
            norm=self.norm and replace(self.norm, weight=self.norm.weight.double()),
        )

    def features(self, dtype: torch.dtype, step: int) -> torch.Tensor:
        """Return one token of every row; the row without a slot is NaN."""
        values = self.unit.heads * self.unit.value_channels
        shape = (ROWS, self.units, self.unit.width + values)
        x = torch.randn(shape, generator=generator(step)).to(self.weights.a_log.device)
        x[..., self.unit.dt : self.unit.dt + self.unit.heads] += self.shift
        x[1] = torch.nan
        return x.to(dtype)

    def step(self, features: torch.Tensor, implementation: str | None) -> torch.Tensor:
        """Decode one token of every row."""
        values = self.unit.heads * self.unit.value_channels
        source, gate = features.split([self.unit.width, values], dim=-1)
        return recurrence_decode(
            source,
            self.weights,
            unit=self.unit,
            memory=self.memory,
            skip=self.skip,
            norm=self.norm and replace(self.norm, gate=gate),
            implementation=implementation,
        )


def assert_steps_agree(layer: Layer, dtype: torch.dtype, steps: int) -> None:
    """Decode tokens with the kernel and in plain torch; compare outputs and states."""
    true, memory = layer.to_fp64(), layer.memory
    before = replace(memory, conv=memory.conv.clone(), state=memory.state.clone())
    bounds = BOUND if memory.state.is_cuda else CPU_BOUND
    for step in range(steps):
        features = layer.features(dtype, step)
        with nan_memory():
            actual = layer.step(features, "triton")
        expected = true.step(features.double(), "reference")
        assert relative_error(actual, expected) <= bounds[dtype], step
        assert not actual[1].any()
    state_bound = bounds[memory.state.dtype]
    assert_close_by_metric("state", memory.state[:-1], true.memory.state[:-1], bound=state_bound)
    assert torch.equal(memory.conv[:-1].double(), true.memory.conv[:-1]), "rows are copied"
    used = memory.slots[memory.slots >= 0]
    unused = [slot for slot in range(len(memory.state) - 1) if slot not in used.tolist()]
    for states, old in ((memory.conv, before.conv), (memory.state, before.state)):
        assert torch.equal(states[unused], old[unused])
        changed = (states[used] != old[used]).flatten(1).any(1)
        assert states.numel() == 0 or changed.all()
        assert states[-1].isnan().all()
    if memory.arrival_counts is not None:
        assert not memory.arrival_counts[used].any(), "the next call starts from zero"
        assert set(memory.arrival_counts[unused].flatten().tolist()) == {7}


def kernels():
    """Return the module of the kernel."""
    from megatron.core.ops.recurrence.decode import triton

    return triton


@pytest.fixture
def set_program_heads(monkeypatch):
    """Return a function that sets the heads of a program, in the interpreter."""

    def set_heads(heads: int) -> None:
        if REHEARSES:
            launch = {"HEADS": heads, "num_warps": 1, "num_stages": 1}
            monkeypatch.setattr(kernels(), "DECODE", Launches("recurrence_decode", launch))
            monkeypatch.setattr(kernels(), "NORM_BLOCK", 16)  # less than a unit

    return set_heads


@KERNELS
@pytest.mark.parametrize("case", CASES)
def test_decode_kernel_matches_plain_torch(device, case, set_program_heads):
    unit, heads, options = CASES[case]
    set_program_heads(heads)
    assert_steps_agree(Layer.of(device, torch.float32, 2, unit, **options), torch.float32, 2)


@KERNELS
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])
@pytest.mark.parametrize("name", MODELS)
def test_decode_of_models_matches_plain_torch(device, dtype, order, name):
    layer = Layer.of_model(device, name, dtype, order=order)
    assert_steps_agree(layer, dtype, STEPS)


@KERNELS
def test_bf16_states_are_rounded(device):
    name = next(iter(MODELS))
    layer = Layer.of_model(device, name, torch.float32, states=torch.bfloat16)
    assert_steps_agree(layer, torch.float32, 1)


@KERNELS
def test_padding_batch_changes_no_state(device):
    layer = Layer.of(device, torch.float32, 2, DELTA, shared=True)
    memory = replace(layer.memory, slots=torch.full_like(layer.memory.slots, -1))
    state, conv = memory.state.clone(), memory.conv.clone()
    y = replace(layer, memory=memory).step(layer.features(torch.float32, 0), "triton")
    assert not y.any()
    assert torch.equal(memory.state[:-1], state[:-1])
    assert torch.equal(memory.conv[:-1], conv[:-1])


@KERNELS
def test_too_large_state_is_refused(device):
    layer = Layer.of(device, torch.float32, 2, UnitLayout.delta(1, 257, 65), shared=True)
    features = layer.features(torch.float32, 0)
    message = r"257 x 65.*use implementation='reference'"
    assert_refused(lambda: layer.step(features, "triton"), message)


@KERNELS
@pytest.mark.parametrize("name", MODELS)
def test_nan_steps_propagate(device, name):
    """On a GPU, the maximum of a number and NaN is the number."""
    layer = Layer.of_model(device, name, DTYPES[-1])
    features = layer.features(DTYPES[-1], 0)
    features[0, 0, layer.unit.dt] = torch.nan
    layer.step(features, "triton")
    state = layer.memory.state[layer.memory.slots[0]]
    assert state[0].isnan().all()
    assert state[1:].isfinite().all()


@KERNELS
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_launch_candidate_matches_reference(device, name, monkeypatch):
    candidates = kernels().DECODE.candidates
    for launch in candidates[-2:] if REHEARSES else candidates:
        monkeypatch.setattr(kernels(), "DECODE", Launches("recurrence_decode", launch))
        layer = Layer.of_model(device, name, torch.float32, order=GATE_FIRST)
        assert_steps_agree(layer, torch.float32, 2)


@KERNELS
@pytest.mark.parametrize("name", MODELS)
def test_decode_step_is_one_kernel(device, name):
    layer = Layer.of_model(device, name, DTYPES[-1])
    features = layer.features(DTYPES[-1], 0)
    assert_launches(lambda: layer.step(features, "triton"), {"recurrence_decode_kernel": 1})


@KERNELS
@pytest.mark.machine
@pytest.mark.parametrize("name", MODELS)
def test_graph_replay_reads_updated_slots_and_tokens(device, name):
    """A replay reads the current contents of its buffers, like the engine's."""
    layer = Layer.of_model(device, name, torch.bfloat16)
    features = layer.features(torch.bfloat16, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.step(features, None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.step(features, None)
    memory = layer.memory
    eager = replace(
        layer, memory=replace(memory, conv=memory.conv.clone(), state=memory.state.clone())
    )
    for step in range(1, 6):
        features.copy_(layer.features(torch.bfloat16, step))
        memory.slots.copy_(memory.slots.roll(3))
        graph.replay()
        expected = eager.step(features, None)
        assert torch.equal(y, expected)
    assert torch.equal(memory.state[:-1], eager.memory.state[:-1])
    assert torch.equal(memory.conv[:-1], eager.memory.conv[:-1])


# --- layers

HIDDEN, PROMPT = 8, 4
#: The rows with a token in each decode step after the prompt.
TOKENS = ((1, 1, 1), (1, 0, 1), (0, 1, 0))
MIXERS = {
    "delta": GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=5, value_channels=3
    ),
    "mamba": Mamba2Config(num_heads=4, head_channels=3, state_channels=5, num_groups=2),
    "mamba with one norm group": Mamba2Config(
        num_heads=2, head_channels=3, state_channels=5, num_groups=2, norm_groups=1, bias=True
    ),
}


@KERNELS
@pytest.mark.skipif(not REHEARSES, reason="layers of test_engine_gpu run on a GPU")
@pytest.mark.parametrize("kind", MIXERS)
@torch.no_grad()
def test_prefill_and_decode_of_layer_match_whole_sequence(kind, monkeypatch):
    layer, _ = make_mixer(MIXERS[kind], HIDDEN)
    count = PROMPT + len(TOKENS)
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
    for step in TOKENS:
        feed([int(count) for count in step])
    assert paged_steps.num_fed == [PROMPT + 2] * 3
    assert relative_error(out[: PROMPT + 2], expected[: PROMPT + 2]) < 1e-5
    assert len(calls) >= len(TOKENS)


@KERNELS
@pytest.mark.skipif(not REHEARSES, reason="layers of test_engine_gpu run on a GPU")
@pytest.mark.parametrize("kind", ["delta", "mamba"])
@torch.no_grad()
def test_decode_launches_one_kernel_between_projections(kind, monkeypatch):
    monkeypatch.setattr(recurrence_decode_op, "_implementation", lambda *_: "triton")
    layer, _ = make_mixer(MIXERS[kind], HIDDEN)
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
