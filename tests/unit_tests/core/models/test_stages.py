# SPDX-License-Identifier: Apache-2.0
"""Splits of a model into pipeline stages: three notations, and refused splits."""

from __future__ import annotations

import itertools

import pytest

from megatron.core.models.layer_pattern import (
    StageSplit,
    even_problems,
    layer_blocks,
    layout_problems,
    pattern_problems,
    symbols_of,
)

EVEN = [
    (8, 4, {}, "2|2|2|2 layers"),
    (8, 1, {}, "8 layers"),
    (8, 2, {"chunks": 2}, "2+2|2+2 layers"),
    (10, 4, {"first_layers": 1, "last_layers": 3}, "1|3|3|3 layers"),
    (7, 3, {"first_layers": 3}, "3|2|2 layers"),
    (5, 3, {"last_layers": 1}, "2|2|1 layers"),
    (6, 3, {"first_layers": 0}, "0|3|3 layers"),
    (12, 3, {"first_layers": 2, "last_layers": 4, "chunks": 2}, "1+1|3+3|2+2 layers"),
    (5, 2, {"first_layers": 2, "last_layers": 3}, "2|3 layers"),
    (7, 4, {"count_embedding": True}, "1|2|2|2 layers"),
    (7, 4, {"count_loss": True}, "2|2|2|1 layers"),
    (6, 4, {"count_embedding": True, "count_loss": True}, "1|2|2|1 layers"),
    (14, 2, {"chunks": 2, "count_embedding": True, "count_loss": True}, "3+4|4+3 layers"),
    (2, 4, {"count_embedding": True, "count_loss": True}, "0|1|1|0 layers"),
    (3, 1, {"count_embedding": True, "count_loss": True}, "3 layers"),
]


@pytest.mark.parametrize(("num_layers", "stages", "options", "text"), EVEN)
def test_even_split_has_the_expected_layers(num_layers: int, stages: int, options: dict, text: str):
    assert even_problems(num_layers, stages, **options) == []
    split = StageSplit.even(num_layers, stages, **options)
    assert split.describe() == text
    assert split.num_blocks == 2 * num_layers
    assert split.chunks == options.get("chunks", 1)


def test_even_split_covers_layers_with_equal_stages():
    legal = refused = 0
    layer_counts = (None, 0, 1, 3)
    for num_layers, stages, chunks, first_layers, last_layers in itertools.product(
        range(1, 13), range(1, 5), (1, 2, 3), layer_counts, layer_counts
    ):
        options = {"chunks": chunks, "first_layers": first_layers, "last_layers": last_layers}
        if even_problems(num_layers, stages, **options):
            refused += 1
            with pytest.raises(ValueError, match=r": (use|write)|need 2 stages"):
                StageSplit.even(num_layers, stages, **options)
            continue
        legal += 1
        split = StageSplit.even(num_layers, stages, **options)
        sizes = [end - start for start, end in split.ranges]
        assert sum(sizes) == 2 * num_layers
        layers_of_stage = [sum(sizes[stage::stages]) // 2 for stage in range(stages)]
        if first_layers is not None:
            assert layers_of_stage.pop(0) == first_layers
        if last_layers is not None:
            assert layers_of_stage.pop() == last_layers
        assert len(set(layers_of_stage)) <= 1
        assert all(len(set(sizes[stage::stages])) == 1 for stage in range(stages))
    assert min(legal, refused) > 100


def test_chunks_are_assigned_to_stages_round_robin():
    split = StageSplit.even(14, 2, chunks=2, count_embedding=True, count_loss=True)
    assert split.ranges == ((0, 6), (6, 14), (14, 22), (22, 28))
    assert [
        split.blocks(*chunk_position) for chunk_position in ((0, 0), (1, 0), (0, 1), (1, 1))
    ] == list(split.ranges)


def test_pattern_splits_between_any_two_blocks():
    split = StageSplit.from_pattern("*-*-|*-*|-*-|", 4, ffn_pattern="-----")
    assert split.ranges == ((0, 4), (4, 7), (7, 10), (10, 10))
    assert split.describe() == "4|3|3|0 blocks"
    assert (split.chunks, split.num_blocks) == (1, 10)
    twice = StageSplit.from_pattern("*-*-|*-*|-*-|", 2)
    assert (twice.chunks, twice.describe()) == (2, "4+3|3+0 blocks")
    assert StageSplit.from_pattern("*-*-|*-", 2).describe() == "2|1 layers"
    assert StageSplit.from_pattern("*E*-|*E", 2, ffn_pattern="E-E").describe() == "2|1 layers"
    assert StageSplit.from_pattern("|**||-", 4).ranges == ((0, 0), (0, 2), (2, 2), (2, 3))


LAYOUTS = [
    ("Et|tL", 2, 2, "1|1 layers"),
    ("EttL", 1, 2, "2 layers"),
    ("E|t|t|L", 4, 2, "0|1|1|0 layers"),
    ("Et*3|(tt|)*2,L", 4, 7, "3|2|2|0 layers"),
    ("Et*2|tt|t|L", 2, 5, "2+1|2+0 layers"),
    (" E t * 2 , | ((t)*2|)*3 ,, L ", 5, 8, "2|2|2|2|0 layers"),
    ("E(t*2|(t|)*2)*2tL", 7, 9, "2|1|1|2|1|1|1 layers"),
    ("(E|t)*1|*2L*1", 4, 1, "0|1|0|0 layers"),
    ("Et*0tL", 1, 1, "1 layers"),
]


@pytest.mark.parametrize(("layout", "stages", "num_layers", "text"), LAYOUTS)
def test_layout_is_parsed_into_stages(layout: str, stages: int, num_layers: int, text: str):
    assert layout_problems(layout, stages, num_layers=num_layers) == []
    assert StageSplit.from_layout(layout, stages, num_layers=num_layers).describe() == text


def test_three_notations_yield_the_same_split():
    expected = StageSplit.even(10, 4, first_layers=1, last_layers=3)
    assert StageSplit.from_layout("Et|(t*3|)*2,t*3L", 4, num_layers=10) == expected
    assert StageSplit.from_pattern("*-|*-*-*-|*-*-*-|*-*-*-", 4, ffn_pattern="-" * 10) == expected


@pytest.mark.parametrize(
    ("call", "messages"),
    [
        (lambda: even_problems(8, 3), ["8 layers do not divide over 3 virtual pipeline stages"]),
        (
            lambda: even_problems(8, 2, chunks=3, count_embedding=True, count_loss=True),
            ["8 layers and the embedding and the loss do not divide over 6 virtual"],
        ),
        (
            lambda: even_problems(0, -1, chunks=0),
            ["0 layers: use", "-1 pipeline stages: use", "0 chunks of a stage: use"],
        ),
        (
            lambda: even_problems(8, 2, first_layers=-1, last_layers=3, chunks=2, count_loss=True),
            [
                "-1 layers in the first pipeline stage: use 0",
                "3 layers in the last pipeline stage do not divide over its 2 chunks: use a",
                "layers of the first and the last pipeline stage are given, so the loss cannot",
            ],
        ),
        (lambda: even_problems(8, 1, first_layers=2), ["need 2 stages or more"]),
        (
            lambda: even_problems(8, 4, first_layers=5, last_layers=6),
            ["5 in the first and 6 in the last pipeline stage are more than the 8 layers"],
        ),
        (
            lambda: even_problems(8, 4, first_layers=1),
            ["8 layers leave 7 with 1 in the first pipeline stage, which do not divide over the 3"],
        ),
        (
            lambda: even_problems(8, 2, first_layers=1, last_layers=2),
            ["8 layers leave 5 with 1 in the first and 2 in the last pipeline stage"],
        ),
        (
            lambda: pattern_problems("*x|-", 3, ffn_pattern="-"),
            [
                "'*x|-': 'x' at 2 is unknown: use '*' (attention)",
                "has 2 stages for 3",
                "must be '*-' for each of the 1",
            ],
        ),
        (lambda: pattern_problems("||", 3), ["'||' must be one or more of '*' (attention)"]),
        (lambda: pattern_problems("*-|*", 2, ffn_pattern="--"), ["'*-' for each of the 2 layers"]),
        (lambda: pattern_problems("*-|*E", 2, ffn_pattern="E-"), ["its '|' must be '*E*-'"]),
        (lambda: pattern_problems("*-|*E", 2, ffn_pattern="--"), ["be '*-' for each of the 2"]),
        (
            lambda: pattern_problems("*E|*", 2, ffn_pattern="--"),
            ["be '*-' or '*E' for each of the"],
        ),
        (lambda: pattern_problems("*-", 0), ["0 pipeline stages: use 1 or more"]),
        (
            lambda: layout_problems("t|t|tE", 2, num_layers=2),
            [
                "has 3 stages for 2 pipeline ranks: write a multiple of 2",
                "the embedding begins the model: begin with its E",
                "has 0 L: write the loss once",
                "has 3 t for 2 layers",
            ],
        ),
        (
            lambda: layout_problems("E|EtL|tL", 3, num_layers=2),
            ["has 2 E: write the embedding once", "has 2 L: write the loss once"],
        ),
        (
            lambda: layout_problems("EtL|t", 2, num_layers=2),
            ["the loss ends the model: end with its L"],
        ),
        (lambda: layout_problems("Et|tL|", 3, num_layers=2), ["the loss ends the model"]),
        (lambda: layout_problems("|Et|tL", 3, num_layers=2), ["the embedding begins the model"]),
        (
            lambda: layout_problems("*2E(t|x)T*)*3((t*|L*99999999999", 2, num_layers=2),
            [
                "'*2' at 1: write what to repeat",
                "'x' at 7 is unknown: use E",
                "'T' at 9 is unknown",
                "'*' at 10: write what to repeat and how often, as in 't*3'",
                "')' at 11 closes nothing: write a '('",
                "'*' at 17: write what",
                "'*99999999999' at 20 repeats too often",
                "'(' at 14 is never closed",
                "'(' at 15 is never closed",
            ],
        ),
        (
            lambda: layout_problems("E((t*999)*999)*999L", 1, num_layers=9),
            ["'*999' at 10 repeats too often", "'*999' at 15 repeats too often"],
        ),
    ],
)
def test_all_split_problems_are_reported_at_once(call, messages: list[str]):
    problems = call()
    for message in messages:
        assert sum(message in problem for problem in problems) == 1, (message, problems)
    assert len(problems) == len(messages), problems


def test_invalid_splits_are_refused():
    with pytest.raises(ValueError, match=r"8 layers do not divide .* or write the boundaries"):
        StageSplit.even(8, 3)
    with pytest.raises(ValueError, match=r"has 2 stages for 3 .*; layer pattern"):
        StageSplit.from_pattern("*-|-", 3, ffn_pattern="-")
    with pytest.raises(ValueError, match=r"has 0 E: .*; pipeline layout 'tL' has 1 t for 2 layers"):
        StageSplit.from_layout("tL", 1, num_layers=2)
    for ranges in (((0, 2), (3, 4)), ((1, 2),), ((0, 4), (4, 2))):
        with pytest.raises(ValueError, match="are not contiguous"):
            StageSplit(1, ranges)
    for stages, ranges in ((2, ((0, 1),)), (0, ((0, 1),)), (1, ())):
        with pytest.raises(ValueError, match="virtual stages do not divide over"):
            StageSplit(stages, ranges)


def test_pattern_yields_symbols_and_layer_blocks():
    assert symbols_of("*-|*|-") == "*-*-"
    assert layer_blocks("*-**--") == [(0, 2), (2, 3), (3, 5), (5, 6)]
