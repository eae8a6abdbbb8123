# SPDX-License-Identifier: Apache-2.0
"""Slots of recurrent states: taken, freed and taken again; which tokens of a call are real."""

import math

import pytest
import torch

from megatron.core.inference.cache import BatchCache, StateCache
from megatron.core.ssm.mixer import carried, keep

CPU = torch.device("cpu")


def buffer(cache: BatchCache | StateCache, name: str = "a", **changes) -> torch.Tensor:
    return cache.buffer(name, **{"shape": (2, 3), "dtype": torch.float64, "device": CPU} | changes)


def test_a_slot_that_is_taken_again_starts_from_zeros_and_others_stay() -> None:
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
    for kept in buffers:
        assert not kept[first].any()
        assert (kept[second] == 7).all()
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
    found = carried(kept, slots)
    assert torch.equal(found, torch.stack([before[2], torch.zeros(3), before[0], torch.zeros(3)]))
    keep(kept, slots, torch.tensor([[2.0], [math.nan], [0.5], [math.nan]]).expand(4, 3))
    assert torch.equal(kept[:3], torch.stack([torch.full((3,), 0.5), before[1], 2 * torch.ones(3)]))


def test_the_last_tokens_of_each_row_are_the_real_ones() -> None:
    cache = BatchCache(9, rows=3)
    assert cache.slots.tolist() == [-1, -1, -1]
    cache.begin([2, 0, 4])
    first, _, third = cache.slots.tolist()
    assert cache.slots.tolist() == [first, -1, third]
    assert len({first, third} & {0, 1, 2}) == 2
    x = torch.arange(15.0).reshape(5, 3, 1)  # [s, b, 1]: token 3 · place + row
    rows = cache.new_tokens(5)
    assert rows is cache.new_tokens(5)  # made once, however many layers ask
    assert rows.sequences.bounds == (0, 2, 2, 6)
    packed = rows.pack(x)
    assert packed.flatten().tolist() == [9, 12, 5, 8, 11, 14]
    back = torch.zeros(5, 3, 1)
    back[3:, 0], back[1:, 2] = x[3:, 0], x[1:, 2]
    assert torch.equal(rows.unpack(packed), back)
    cache.begin([1, 1, 1])
    assert cache.new_tokens(1).sequences.bounds == (0, 1, 2, 3)


def test_a_row_that_has_ended_gives_its_slot_back() -> None:
    states = StateCache(3)
    cache = BatchCache(9, rows=2, states=states)
    cache.begin([1, 1])
    slots = cache.slots.tolist()
    cache.end(0)
    cache.end(0)
    assert states.free_slots == 2
    cache.begin([0, 1])
    assert cache.slots.tolist() == [-1, slots[1]]
    with pytest.raises(ValueError, match="row 0 has ended"):
        cache.begin([1, 1])
    cache.close()
    assert states.free_slots == 3


def test_counts_that_do_not_fit_the_call_are_refused() -> None:
    cache = BatchCache(9, rows=2)
    with pytest.raises(ValueError, match="3 counts of tokens for 2 rows"):
        cache.begin([1, 1, 1])
    cache.begin([1, 4])
    with pytest.raises(ValueError, match="a row has 4 new tokens, the call 3"):
        cache.new_tokens(3)


def test_slots_stay_where_they_are_and_are_written_only_when_rows_change() -> None:
    cache = BatchCache(9, rows=2)
    cache.begin([3, 2])
    slots, written = cache.slots, cache.slots._version
    cache.begin([1, 1])
    assert cache.slots._version == written
    first = int(slots[0])
    cache.begin([1, 0])
    assert cache.slots is slots  # a CUDA graph may hold them
    assert slots.tolist() == [first, -1]
