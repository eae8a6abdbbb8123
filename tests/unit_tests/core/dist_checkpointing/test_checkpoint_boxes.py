# SPDX-License-Identifier: Apache-2.0
"""Box arithmetic against brute force over every element."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.boxes import (
    Box,
    BoxIndex,
    boxes_of_range,
    first_overlap,
    flat_index,
    tiles,
)
from tests.support.stored_structures import pinwheel
from tests.unit_tests.core.dist_checkpointing.layouts import random_boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def elements(box: Box) -> set[tuple[int, ...]]:
    spans = (range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*spans))


@given(SHAPES, st.data())
@settings(max_examples=150, deadline=None)
def test_flat_range_splits_into_few_contiguous_boxes(shape, data):
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    boxes = boxes_of_range(shape, begin, end)
    positions = []
    for box in boxes:
        box_positions = sorted(flat_index(shape, index) for index in elements(box))
        # contiguous in memory
        assert box_positions == list(range(box_positions[0], box_positions[0] + box.numel))
        positions += box_positions
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
    overlap = first_overlap(boxes)
    assert (overlap is not None) == bool(pairs)
    if overlap:
        assert tuple(sorted(overlap)) in pairs


def test_boxes_without_separating_plane_are_still_disjoint():
    _, boxes = pinwheel(1)
    assert first_overlap(boxes) is None
    assert first_overlap([*boxes, Box((1, 1), (1, 1))]) is not None


@given(st.integers(0, 10_000))
@settings(max_examples=200, deadline=None)
def test_boxes_tile_iff_each_element_is_covered_once(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 4)))
    boxes = random_boxes(shape, rng, depth=6)
    for _ in range(rng.randint(0, 2)):
        position = rng.randrange(len(boxes))
        dim = rng.randrange(len(shape)) if shape else None
        change = rng.choice(("drop", "double", "move", "grow"))
        if change == "drop" and len(boxes) > 1:
            boxes.pop(position)
        elif change == "double":
            boxes.append(boxes[position])
        elif dim is not None:
            field = 0 if change == "move" else 1
            numbers = [list(boxes[position].offsets), list(boxes[position].sizes)]
            numbers[field][dim] += 1
            boxes[position] = Box(tuple(numbers[0]), tuple(numbers[1]))
    rng.shuffle(boxes)
    counts = Counter(index for box in boxes for index in elements(box))
    exact = counts == Counter(elements(Box((0,) * len(shape), shape)))
    assert tiles(boxes, shape) == (exact or 0 in shape)


def test_pinwheel_tiles_until_a_box_is_changed():
    shape, boxes = pinwheel(3000)
    assert tiles(boxes, shape)
    for index in (0, 5000, len(boxes) - 1):
        box = boxes[index]
        for changed in ([], [box, box], [Box((box.offsets[0] + 1, box.offsets[1]), box.sizes)]):
            assert not tiles([*boxes[:index], *changed, *boxes[index + 1 :]], shape)


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_box_index_finds_every_overlap(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
    boxes = [box for _ in range(rng.randint(1, 2)) for box in random_boxes(shape, rng, depth=6)]
    rng.shuffle(boxes)
    index = BoxIndex(boxes)
    for box in random_boxes(shape, rng, depth=6):
        overlaps = dict(index.overlaps(box))
        shared = {i: elements(indexed) & elements(box) for i, indexed in enumerate(boxes)}
        assert {i: elements(common) for i, common in overlaps.items()} == {
            i: common for i, common in shared.items() if common
        }
    assert BoxIndex([]).overlaps(Box((0,), (1,))) == []
