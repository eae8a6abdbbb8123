# SPDX-License-Identifier: Apache-2.0
"""Memory traffic of the recurrence kernels, counted from launches on meta tensors.

Each tensor that a kernel reads or writes counts once, as programs that share a tensor read it from
the L2 cache.
"""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.recurrence.delta_rule import triton as delta
from megatron.core.ops.recurrence.sweep import triton as kernels
from megatron.core.ops.sequences import Sequences

#: Qwen3-Next: one sequence, 16 heads of keys and 32 of values, 128 features.
TOKENS, GROUPS, HEADS, FEATURES, CHUNK = 32768, 16, 32, 128, 64
#: Bytes of bf16: of queries or keys, of values, of the states of all chunks, of [C, C] squares.
KEYS, VALUES = (2 * TOKENS * heads * FEATURES for heads in (GROUPS, HEADS))
STATES = 2 * TOKENS // CHUNK * HEADS * FEATURES**2
SQUARES = 2 * TOKENS * HEADS * CHUNK


class TrafficCounter:
    """Count the bytes of the tensors of each launch instead of launching the kernel."""

    def __init__(self, kernel, moved: Counter[str]) -> None:
        self.programs = 0
        self.name = kernel.fn.__name__
        self.parameters = list(inspect.signature(kernel.fn).parameters)
        self.moved = moved

    def __getitem__(self, grid):
        self.programs += grid[0]
        return self.launch

    def launch(self, *arguments, **constants):
        named = dict(zip(self.parameters, arguments, strict=False)) | constants
        if not named.get("HAS_OUT", True):
            del named["query_ptr"]
        if self.name == "reverse_sweep_kernel":
            del named["value_ptr"]  # all kernels have the same first parameters
        tensors = {id(x): x for x in named.values() if isinstance(x, torch.Tensor)}
        self.moved[self.name] += sum(
            x.nbytes for x in tensors.values() if x.dtype == torch.bfloat16
        )


@pytest.fixture
def moved(monkeypatch) -> Counter[str]:
    """Return bytes of bf16 by kernel; gates, sums and tables of tiles are fp32 and int64."""
    counter: Counter[str] = Counter()
    for module in (kernels, delta):
        for name in dir(module):
            if name.endswith("_kernel"):
                kernel = TrafficCounter(getattr(module, name), counter)
                monkeypatch.setattr(module, name, kernel)
    return counter


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def prepared_by(recurrence: delta.DeltaRuleKernels, bounds: tuple[int, ...]):
    """Return the prepared recurrence for sequences with the heads of Qwen3-Next."""
    key, value = meta(TOKENS, GROUPS, FEATURES), meta(TOKENS, HEADS, FEATURES)
    gates = (meta(TOKENS, HEADS, dtype=torch.float32) for _ in range(2))
    inputs = RecurrenceInputs(torch.empty_like(key), key, value, *gates)
    return recurrence.prepare(inputs, Sequences(bounds, device=torch.device("meta")))


def test_delta_rule_traffic_is_minimal(moved):
    recurrence = delta.DeltaRuleKernels(None, CHUNK)
    prepared = prepared_by(recurrence, (0, TOKENS))
    recurrence.sweep(prepared, None)
    assert moved == {
        "solve_kernel": 2 * KEYS + 2 * SQUARES,
        "sweep_kernel": 2 * KEYS + 2 * VALUES + 2 * SQUARES,
    }
    moved.clear()
    recurrence.backward(prepared, meta(TOKENS, HEADS, FEATURES), None)
    assert moved == {
        "sweep_kernel": KEYS + VALUES + SQUARES + STATES,
        "seen_kernel": 2 * KEYS + SQUARES,
        "reverse_sweep_kernel": 2 * KEYS + 2 * VALUES + 2 * SQUARES + STATES,
        # The gradients of queries and keys are written once, by programs of all heads of a group.
        "recurrence_gradients_kernel": 4 * KEYS + 4 * VALUES + SQUARES + 2 * STATES,
    }
    assert moved.total() <= 6.2e9


def test_saved_states_skip_the_recomputing_sweep(moved):
    recurrence = delta.DeltaRuleKernels(None, CHUNK)
    prepared = prepared_by(recurrence, (0, TOKENS))
    recurrence.sweep(prepared, None, keep_states=True)
    assert moved["sweep_kernel"] == 2 * KEYS + 2 * VALUES + 2 * SQUARES + STATES
    moved.clear()
    recurrence.backward(prepared, meta(TOKENS, HEADS, FEATURES), None)
    assert "sweep_kernel" not in moved
    assert prepared.states_before.nbytes == STATES == 2 * TOKENS // CHUNK * HEADS * FEATURES**2


@pytest.mark.parametrize("sequences", [1, 4])
def test_packed_sequences_are_swept_in_parallel(moved, sequences):
    """A program computes 32 value columns of one head of one sequence."""
    recurrence = delta.DeltaRuleKernels(None, CHUNK)
    bounds = tuple(range(0, TOKENS + 1, TOKENS // sequences))
    prepared = prepared_by(recurrence, bounds)
    recurrence.sweep(prepared, None)
    assert kernels.sweep_kernel.programs == sequences * HEADS * FEATURES // 32
    recurrence.backward(prepared, meta(TOKENS, HEADS, FEATURES), None)
    assert kernels.reverse_sweep_kernel.programs == sequences * HEADS * FEATURES // 32
