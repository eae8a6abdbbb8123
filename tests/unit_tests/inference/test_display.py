# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows: prompts in order, the first unfinished output live."""

import io

from megatron.inference.generate import OrderedPrinter
from megatron.inference.llm import TextDelta, TextOutput


def piece(prompt: int, text: str, *, index: int = 0, ends: bool = False) -> TextDelta:
    output = TextOutput(
        prompt="", prompt_ids=(1,), text=text, ids=(), logprobs=(), finish_reason="length"
    )
    return TextDelta(prompt=prompt, index=index, text=text, output=output if ends else None)


def test_prompts_print_in_order_and_the_first_is_streamed() -> None:
    out = io.StringIO()
    display = OrderedPrinter(["A:", "B:", "C:"], 1, out)
    display.update(piece(0, "x"))
    display.update(piece(1, "1"))
    assert out.getvalue() == "--- prompt 1 of 3\nA:x"
    display.update(piece(0, "y"))
    display.update(piece(1, "2", ends=True))
    assert out.getvalue() == "--- prompt 1 of 3\nA:xy"
    display.update(piece(0, "z", ends=True))
    assert out.getvalue() == "--- prompt 1 of 3\nA:xyz\n--- prompt 2 of 3\nB:12\n"
    display.update(piece(2, "", ends=True))
    assert out.getvalue().endswith("B:12\n--- prompt 3 of 3\nC:\n")


def test_several_outputs_of_a_prompt_follow_each_other() -> None:
    out = io.StringIO()
    display = OrderedPrinter(["A:"], 2, out)
    display.update(piece(0, "second", index=1, ends=True))
    assert out.getvalue() == ""
    display.update(piece(0, "first", ends=True))
    assert out.getvalue() == (
        "--- prompt 1 of 1, output 1 of 2\nA:first\n--- prompt 1 of 1, output 2 of 2\nA:second\n"
    )


def test_a_single_prompt_needs_no_heading() -> None:
    out = io.StringIO()
    OrderedPrinter(["A "], 1, out).update(piece(0, "b", ends=True))
    assert out.getvalue() == "A b\n"
