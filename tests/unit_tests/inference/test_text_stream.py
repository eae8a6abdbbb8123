# SPDX-License-Identifier: Apache-2.0
"""Streamed text: the pieces add up to the whole and never split a character."""

import io
import random
from collections.abc import Sequence

import pytest

from megatron.inference.generate import REPLACEMENT, Display, TextStream


def detokenize(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def pieces(tokens: bytes, step: int) -> list[str]:
    stream = TextStream(detokenize)
    ends = [*range(step, len(tokens), step), len(tokens)]
    return [stream.push(tokens[:end], finished=end == len(tokens)) for end in ends]


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_pieces_add_up_and_split_no_character(step: int) -> None:
    text = "aé€😀 plain – 漢字 𝄞𝄞 end"
    got = pieces(text.encode(), step)
    assert "".join(got) == text
    assert not any(REPLACEMENT in piece for piece in got)


def test_ascii_is_not_held_back() -> None:
    assert pieces(b"abc", 1) == ["a", "b", "c"]


def test_bytes_that_are_no_text_add_up_too() -> None:
    source = random.Random(0)
    for _ in range(200):
        tokens = bytes(source.choices([0x41, 0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98], k=12))
        assert "".join(pieces(tokens, 1)) == detokenize(tokens)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    assert pieces("x€".encode()[:-1], 1)[-1] == REPLACEMENT


def test_prompts_are_shown_in_order_and_the_first_one_live() -> None:
    out = io.StringIO()
    display = Display(["A:", "B:", "C:"], [detokenize] * 3, out)
    display.update(0, b"x", finished=False)
    display.update(1, b"1", finished=False)
    assert out.getvalue() == "--- prompt 1 of 3\nA:x"
    display.update(0, b"xy", finished=False)
    display.update(1, b"12", finished=True)
    assert out.getvalue() == "--- prompt 1 of 3\nA:xy"
    display.update(0, b"xyz", finished=True)
    assert out.getvalue() == "--- prompt 1 of 3\nA:xyz\n--- prompt 2 of 3\nB:12\n"
    display.update(1, b"12", finished=True)  # the engine reports finished sequences again
    display.update(2, b"", finished=True)
    assert out.getvalue().endswith("B:12\n--- prompt 3 of 3\nC:\n")


def test_a_single_prompt_needs_no_heading() -> None:
    out = io.StringIO()
    Display(["A "], [detokenize], out).update(0, b"b", finished=True)
    assert out.getvalue() == "A b\n"
