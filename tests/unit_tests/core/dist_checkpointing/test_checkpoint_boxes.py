# SPDX-License-Identifier: Apache-2.0
"""Box arithmetic against brute force over every element."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.boxes import (
    Box,
    boxes_of_range,
    first_overlap,
    flat_index,
    intersect,
)
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
def test_overlaps_are_found_exactly_when_there_are_any(seed):
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


def test_boxes_that_no_plane_separates_are_still_told_apart():
    pinwheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert first_overlap(pinwheel) is None
    assert first_overlap([*pinwheel, Box((1, 1), (1, 1))]) is not None


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
