# SPDX-License-Identifier: Apache-2.0
"""Slots of recurrent states: allocation, release, copies and reuse."""

import math

import pytest
import torch

from megatron.core.inference.cache import StateCache
from megatron.core.ssm.mixer import load_state, store_state

CPU = torch.device("cpu")


def buffer(cache: StateCache, name: str = "a", **changes) -> torch.Tensor:
    return cache.buffer(name, **{"shape": (2, 3), "dtype": torch.float64, "device": CPU} | changes)


def test_reused_state_slot_is_zeroed_and_others_are_unchanged() -> None:
    states = StateCache(3)
    reused, in_use = states.take(2)
    buffers = [buffer(states), buffer(states, "b", shape=(5,), dtype=torch.bfloat16)]
    assert [b.shape for b in buffers] == [(4, 2, 3), (4, 5)]
    assert states.num_bytes == 4 * 6 * 8 + 4 * 5 * 2
    for tensor in buffers:
        assert not tensor.any()
        tensor.fill_(math.nan)
        tensor[in_use] = 7
    states.release([reused])
    assert states.take(1) == [reused]
    states.copy([(None, reused)])
    for tensor in buffers:
        assert not tensor[reused].any()
        equal = bool((tensor[in_use] == 7).all())
        assert equal
    assert buffer(states).data_ptr() == buffers[0].data_ptr()


def test_unallocated_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="a state cache of 0 slots"):
        StateCache(0)
    states = StateCache(2)
    (slot,) = states.take(1)
    with pytest.raises(ValueError, match="2 sequences, but 1 of 2 slots are free"):
        states.take(2)
    for invalid in (1 - slot, -1, 2):
        with pytest.raises(ValueError, match=f"slot {invalid} of 2 is not allocated"):
            states.release([invalid])
    assert states.free_slots == 1


@pytest.mark.parametrize("changes", [{"shape": (3, 2)}, {"dtype": torch.float32}])
def test_buffer_of_another_shape_or_dtype_is_refused(changes: dict) -> None:
    states = StateCache(2)
    buffer(states)
    with pytest.raises(ValueError, match=r"state a: .* does not match \[2, 3\] torch.float64"):
        buffer(states, **changes)


def test_a_row_without_a_slot_reads_zeros_and_writes_nothing() -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    tensor[-1] = math.nan  # the slot of padding
    before = tensor.clone()
    slots = torch.tensor([2, -1, 0, -1])
    loaded = load_state(tensor, slots)
    assert torch.equal(loaded, torch.stack([before[2], torch.zeros(3), before[0], torch.zeros(3)]))
    store_state(tensor, slots, torch.tensor([[2.0], [math.nan], [0.5], [math.nan]]).expand(4, 3))
    assert torch.equal(
        tensor[:3], torch.stack([torch.full((3,), 0.5), before[1], 2 * torch.ones(3)])
    )


def test_copied_state_slot_is_independent_of_its_source() -> None:
    states = StateCache(3)
    source, target = states.take(2)
    tensor = buffer(states)
    tensor[source] = 3.0
    copy = states.take(1)[0]
    states.copy([(source, target), (None, source), (target, copy), (source, target)])
    equal = bool((tensor[copy] == 3.0).all())
    assert equal
    assert not tensor[[source, target]].any()
