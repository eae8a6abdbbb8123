# SPDX-License-Identifier: Apache-2.0
"""Slots of recurrent states: taken, freed, copied and taken again."""

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
    first, second = states.take(2)
    buffers = [buffer(states), buffer(states, "b", shape=(5,), dtype=torch.bfloat16)]
    assert [b.shape for b in buffers] == [(4, 2, 3), (4, 5)]
    assert states.num_bytes == 4 * 6 * 8 + 4 * 5 * 2
    for kept in buffers:
        assert not kept.any()
        kept.fill_(math.nan)
        kept[second] = 7
    states.release([first])
    assert states.take(1) == [first]
    states.copy([(None, first)])
    for kept in buffers:
        assert not kept[first].any()
        equal = bool((kept[second] == 7).all())
        assert equal
    assert buffer(states).data_ptr() == buffers[0].data_ptr()


def test_slots_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="a state cache of 0 slots"):
        StateCache(0)
    states = StateCache(2)
    (slot,) = states.take(1)
    with pytest.raises(ValueError, match="2 sequences, but 1 of 2 slots are free"):
        states.take(2)
    for wrong in (1 - slot, -1, 2):
        with pytest.raises(ValueError, match=f"slot {wrong} of 2 is not taken"):
            states.release([wrong])
    assert states.free_slots == 1


@pytest.mark.parametrize("changes", [{"shape": (3, 2)}, {"dtype": torch.float32}])
def test_a_buffer_of_another_model_is_refused(changes: dict) -> None:
    states = StateCache(2)
    buffer(states)
    with pytest.raises(ValueError, match=r"state a: .* does not continue \[2, 3\] torch.float64"):
        buffer(states, **changes)


def test_a_row_without_a_slot_reads_zeros_and_writes_nothing() -> None:
    kept = torch.arange(12.0).reshape(4, 3)
    kept[-1] = math.nan  # nobody's
    before = kept.clone()
    slots = torch.tensor([2, -1, 0, -1])
    found = load_state(kept, slots)
    assert torch.equal(found, torch.stack([before[2], torch.zeros(3), before[0], torch.zeros(3)]))
    store_state(kept, slots, torch.tensor([[2.0], [math.nan], [0.5], [math.nan]]).expand(4, 3))
    assert torch.equal(kept[:3], torch.stack([torch.full((3,), 0.5), before[1], 2 * torch.ones(3)]))


def test_copied_state_slot_is_independent_of_its_source() -> None:
    states = StateCache(3)
    first, second = states.take(2)
    kept = buffer(states)
    kept[first] = 3.0
    third = states.take(1)[0]
    states.copy([(first, second), (None, first), (second, third), (first, second)])
    equal = bool((kept[third] == 3.0).all())
    assert equal
    assert not kept[[first, second]].any()
