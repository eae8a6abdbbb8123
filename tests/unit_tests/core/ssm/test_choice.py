# SPDX-License-Identifier: Apache-2.0
"""The context-parallel mode that auto picks for a recurrence, against bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.ssm.mixer_config import LinearShape, choose_mode, explain, sent_bytes

# Qwen3-Next: 16 key heads, 32 value heads, K = V = 128. Of a token travel, per key head, a query
# and a key of 128, two values of 128, two betas and two alphas: 516, so 16 · 516 = 8,256; out come
# 32 · 128 = 4,096. All but betas and alphas are convolved: 16 · 512 = 8,192.
QWEN = LinearShape(
    units=16,
    features_in=8_256,
    features_out=4_096,
    heads=32,
    key_channels=128,
    value_channels=128,
    transition=128,
    conv_channels=8_192,
    conv_width=4,
)
# The same with 12 key heads: 12 · 516, 24 · 128, 12 · 512.
TWELVE = replace(QWEN, units=12, features_in=6_192, features_out=3_072, heads=24)
TWELVE = replace(TWELVE, conv_channels=6_144)
# Nemotron-H-8B: 8 groups of 16 heads of 64 channels, states of 128. Of a token travel, per group,
# 16 · 64 of x, 128 of B, 128 of C and 16 steps: 1,296, so 10,368; out come 128 · 64 = 8,192. All
# but the steps are convolved: 10,240.
NEMOTRON = LinearShape(
    units=8,
    features_in=10_368,
    features_out=8_192,
    heads=128,
    key_channels=128,
    value_channels=64,
    transition=1,
    conv_channels=10_240,
    conv_width=4,
    shared_features=2_048,
)
# One of its groups, as with tensor parallelism over 8 ranks.
GROUP = replace(NEMOTRON, units=1, features_in=1_296, features_out=1_024, heads=16)
GROUP = replace(GROUP, conv_channels=1_280, shared_features=256)


def shape_of(shape: LinearShape, tokens: int, cp: int, sequences: int = 1, rows: int = 1):
    """Return a shape with T tokens a row over cp ranks."""
    return replace(shape, tokens=tokens // cp, sequences=sequences, rows=rows)


CASES = {
    # (shape, T, N, rows, cp), bytes that headwise sends, bytes that segments send.
    #
    # headwise: 2 (and gradients) · 4,096 tokens · (8,256 + 4,096) · 2 bytes · 3/4 = 151,781,376.
    # A state is 32 · 128 · 128 · 4 = 2,097,152 bytes, and so is what multiplies it. Forward both,
    # backward one, to 3 ranks: 3 · 3 · 2,097,152 = 18,874,368. The halo, to one rank and back:
    # 2 · 3 · 8,192 · 2 = 98,304. Two summaries: 2 · (18,874,368 + 98,304) = 37,945,344.
    "one long sequence": ((QWEN, 16_384, 1, 1, 4), 151_781_376, 37_945_344),
    # As many tokens, 16 times as many summaries.
    "sixteen sequences": ((QWEN, 16_384, 16, 1, 4), 151_781_376, 16 * 37_945_344),
    # A 32nd of the tokens, the same summaries.
    "a short row": ((QWEN, 512, 1, 1, 4), 151_781_376 // 32, 37_945_344),
    # 12 heads over 8 ranks: no headwise. A state: 24 · 128 · 128 · 4 = 1,572,864, three to each of
    # 7 ranks: 33,030,144; the halo: 2 · 3 · 6,144 · 2 = 73,728; twice.
    "heads that do not divide": ((TWELVE, 512, 1, 2, 8), None, 2 * 2 * 33_103_872),
    # 2 · 4,096 · (10,368 + 8,192) · 2 / 2 = 152,043,520. A state: 128 · 128 · 64 · 4 = 4,194,304;
    # two of it and 128 · 4 = 512 bytes to one rank: 8,389,120; halo 2 · 3 · 10,240 · 2 = 122,880.
    # Of two ranks, one has the outer token ranges and one the joined inner range: one summary each.
    "Mamba-2": ((NEMOTRON, 8_192, 1, 1, 2), 152_043_520, 8_512_000),
    "Mamba-2, many sequences": ((NEMOTRON, 8_192, 64, 1, 2), 152_043_520, 64 * 8_512_000),
    # Four ranks share a group: 1,296 + 3 further copies of 256 + 1,024 = 3,088 features;
    # 2 · 1,024 · 3,088 · 2 · 3/4 = 9,486,336. A state: 16 · 128 · 64 · 4 = 524,288; to 3 ranks
    # 3 · (2 · 524,288 + 64) = 3,145,920; halo 2 · 3 · 1,280 · 2 = 15,360; twice.
    "a group for four ranks": ((GROUP, 4_096, 1, 1, 4), 9_486_336, 6_322_560),
    "that group, half the tokens": ((GROUP, 2_048, 1, 1, 4), 4_743_168, 6_322_560),
    # A tie: the summaries of 4 sequences are as large as their tokens. Headwise needs no summaries.
    "equal bytes": ((QWEN, 16_384, 4, 1, 4), 151_781_376, 151_781_376),
}
SEGMENTS = {"one long sequence", "heads that do not divide", "Mamba-2", "a group for four ranks"}


@pytest.mark.parametrize("name", CASES)
def test_auto_picks_mode_with_fewest_bytes(name):
    (shape, tokens, sequences, rows, cp), headwise, segments = CASES[name]
    shape = shape_of(shape, tokens, cp, sequences, rows)
    assert sent_bytes("segments", shape, cp) == segments
    if headwise is not None:
        assert sent_bytes("headwise", shape, cp) == headwise
    choice = choose_mode("auto", shape, cp)
    assert choice.mode == ("segments" if name in SEGMENTS else "headwise")
    for num_bytes in (headwise, segments):
        assert num_bytes is None or f"{num_bytes / 1e6:,.2f} MB" in choice.why
    assert ("not headwise: 12 units" in choice.why) == (headwise is None)


def test_requested_mode_is_used_or_refused():
    shape = shape_of(QWEN, 16_384, 4, 16)
    assert choose_mode("segments", shape, 4).mode == "segments"
    assert choose_mode("headwise", shape, 4).mode == "headwise"
    with pytest.raises(ValueError, match=r"12 units of 24 heads .* over 8 .*: use segments"):
        choose_mode("headwise", TWELVE, 8)
    with pytest.raises(ValueError, match="'ring'"):
        choose_mode("ring", shape, 4)


def test_explain_reports_bytes_of_both_modes():
    text = explain("auto", shape_of(QWEN, 16_384, 4), 4)
    assert text == (
        "recurrences over context parallel 4 by segments: fewest bytes sent per rank and layer: "
        "segments 37.95 MB, headwise 151.78 MB"
    )
    assert "headwise was requested" in explain("headwise", QWEN, 4)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [2, 4])
def test_summaries_match_local_sequences(cp, order):
    for bounds in (None, (0, 16, 16, 48)):
        sharding = SequenceSharding.of(48, cp, order=order, cu_seqlens=bounds)
        layout = SequenceLayout.make(sharding, 0, rows=3, device=torch.device("meta"))
        shape = QWEN.with_tokens(layout, 3, element_bytes=4)
        local_sequences = layout.local_sequences(3)
        assert (shape.tokens, shape.rows, shape.element_bytes) == (48 // cp, 3, 4)
        assert shape.summaries(cp) == local_sequences.export_slots
        without_conv = replace(shape, conv_width=1)
        state = 32 * 128 * 128 * 4
        expected = (
            (cp - 1) * local_sequences.export_slots * (3 if local_sequences.chained else 2) * state
        )
        assert sent_bytes("segments", without_conv, cp) == expected


def test_one_rank_sends_nothing():
    assert sent_bytes("headwise", QWEN, 1) == sent_bytes("segments", QWEN, 1) == 0
