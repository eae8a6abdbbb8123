# SPDX-License-Identifier: Apache-2.0
"""Box arithmetic against brute force over every element."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import boxes as boxes_module
from megatron.core.boxes import (
    Box,
    BoxIndex,
    boxes_of_range,
    first_overlap,
    flat_index,
    intersect,
    tiles,
)
from megatron.core.dist_checkpointing import TensorChunk
from megatron.core.dist_checkpointing.load import plan_reads
from megatron.core.dist_checkpointing.manifest import StoredChunk, StoredTensor
from tests.support.stored_structures import pinwheel
from tests.unit_tests.core.dist_checkpointing.layouts import random_boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def elements(box: Box) -> set[tuple[int, ...]]:
    spans = (range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*spans))


@given(SHAPES, st.data())
@settings(max_examples=150, deadline=None)
def test_a_flat_range_is_few_boxes_that_hold_each_element_once(shape, data):
    whole = math.prod(shape)
    begin = data.draw(st.integers(0, whole))
    end = data.draw(st.integers(begin, whole))
    boxes = boxes_of_range(shape, begin, end)
    positions = []
    for box in boxes:
        mine = sorted(flat_index(shape, index) for index in elements(box))
        assert mine == list(range(mine[0], mine[0] + box.numel))  # contiguous in memory
        positions += mine
    assert positions == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_overlapping_boxes_are_detected_exactly(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    boxes = [box for _ in range(rng.randint(1, 2)) for box in random_boxes(shape, rng)]
    rng.shuffle(boxes)
    boxes = boxes[: rng.randint(1, len(boxes))]
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(len(boxes)), 2)
        if elements(boxes[i]) & elements(boxes[j])
    ]
    found = first_overlap(boxes)
    assert (found is not None) == bool(pairs)
    if found:
        assert tuple(sorted(found)) in pairs


def test_boxes_without_separating_plane_are_still_disjoint():
    _, boxes = pinwheel(1)
    assert first_overlap(boxes) is None
    assert first_overlap([*boxes, Box((1, 1), (1, 1))]) is not None


@given(st.integers(0, 10_000))
@settings(max_examples=200, deadline=None)
def test_boxes_tile_when_each_element_is_in_one_of_them(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 4)))
    boxes = random_boxes(shape, rng, depth=6)
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(boxes))
        dim = rng.randrange(len(shape)) if shape else None
        change = rng.choice(("drop", "double", "move", "grow"))
        if change == "drop" and len(boxes) > 1:
            boxes.pop(at)
        elif change == "double":
            boxes.append(boxes[at])
        elif dim is not None:
            which = 0 if change == "move" else 1
            numbers = [list(boxes[at].offsets), list(boxes[at].sizes)]
            numbers[which][dim] += 1
            boxes[at] = Box(tuple(numbers[0]), tuple(numbers[1]))
    rng.shuffle(boxes)
    counts = Counter(index for box in boxes for index in elements(box))
    exact = counts == Counter(elements(Box((0,) * len(shape), shape)))
    assert tiles(boxes, shape) == (exact or 0 in shape)


def test_a_pinwheel_tiles_and_a_spoiled_one_does_not():
    shape, boxes = pinwheel(3000)
    assert tiles(boxes, shape)
    for at in (0, 5000, len(boxes) - 1):
        box = boxes[at]
        for changed in ([], [box, box], [Box((box.offsets[0] + 1, box.offsets[1]), box.sizes)]):
            assert not tiles([*boxes[:at], *changed, *boxes[at + 1 :]], shape)


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_an_index_finds_all_that_shares_elements(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
    boxes = [box for _ in range(rng.randint(1, 2)) for box in random_boxes(shape, rng, depth=6)]
    rng.shuffle(boxes)
    index = BoxIndex(boxes)
    for box in random_boxes(shape, rng, depth=6):
        found = dict(index.overlaps(box))
        shared = {i: elements(one) & elements(box) for i, one in enumerate(boxes)}
        assert {i: elements(common) for i, common in found.items()} == {
            i: those for i, those in shared.items() if those
        }
    assert BoxIndex([]).overlaps(Box((0,), (1,))) == []


def test_box_index_finds_long_box_among_small_boxes():
    boxes = [Box((0, 0), (6, 1)), *(Box((i, 1), (1, 1)) for i in range(6))]
    found = BoxIndex(boxes).overlaps(Box((4, 0), (1, 2)))
    assert found == [(0, Box((4, 0), (1, 1))), (5, Box((4, 1), (1, 1)))]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reads_of_what_is_cut_into_many_compare_neighbours_only(dim, monkeypatch):
    """Experts whose two halves are joined lie expert by expert, and so they are stored."""
    parts, shape = 97, [3, 3, 3]
    shape[dim] = 2 * parts
    offsets = [tuple(2 * i if d == dim else 0 for d in range(3)) for i in range(parts)]
    sizes = tuple(2 if d == dim else 3 for d in range(3))
    compared = []

    def counted(a: Box, b: Box) -> Box | None:
        compared.append((a, b))
        return intersect(a, b)

    monkeypatch.setattr(boxes_module, "intersect", counted)
    stored = [
        StoredChunk(file="a", box=Box(at, sizes), begin=72 * i, end=72 * (i + 1), xxh3=("",))
        for i, at in enumerate(offsets)
    ]
    chunks = [
        TensorChunk(
            name="up",
            shape=tuple(shape),
            offsets=at,
            tensor=torch.empty(sizes),
            replica_ranks=(0,),
        )
        for at in reversed(offsets)
    ]
    table = {"up": StoredTensor(dtype="F32", shape=tuple(shape), chunks=tuple(stored))}
    reads = plan_reads(table, chunks)["a"]
    assert [read.chunk for read in reads] == stored
    for read, chunk in zip(reads, reversed(chunks), strict=True):
        (read_item,) = read.read_items
        assert read_item.target.data_ptr() == chunk.tensor.data_ptr()
        assert read_item.box == Box((0, 0, 0), sizes)
    assert parts <= len(compared) <= 2 * parts, "not all with all"


def test_two_scalars_overlap():
    assert first_overlap([Box((), ()), Box((), ())]) == (0, 1)


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (Box((0, 0), (2, 3)), Box((1, 1), (4, 1)), Box((1, 1), (1, 1))),
        (Box((0,), (2,)), Box((2,), (2,)), None),
        (Box((1,), (0,)), Box((0,), (3,)), None),
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_intersection(a, b, common):
    assert intersect(a, b) == common == intersect(b, a)
