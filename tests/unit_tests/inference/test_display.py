# SPDX-License-Identifier: Apache-2.0
"""The terminal display: prompts in order, the first unfinished output streamed live."""

import io

from megatron.inference import TextDelta, TextOutput
from megatron.inference.generate import OrderedPrinter


def delta(prompt: int, text: str, *, index: int = 0, is_last: bool = False) -> TextDelta:
    output = TextOutput(
        prompt="", prompt_ids=(1,), text=text, ids=(), logprobs=(), finish_reason="length"
    )
    return TextDelta(prompt=prompt, index=index, text=text, output=output if is_last else None)


def test_prompts_print_in_order_and_first_is_streamed() -> None:
    out = io.StringIO()
    display = OrderedPrinter(["A:", "B:", "C:"], 1, out)
    display.update(delta(0, "x"))
    display.update(delta(1, "1"))
    assert out.getvalue() == "--- prompt 1 of 3\nA:x"
    display.update(delta(0, "y"))
    display.update(delta(1, "2", is_last=True))
    assert out.getvalue() == "--- prompt 1 of 3\nA:xy"
    display.update(delta(0, "z", is_last=True))
    assert out.getvalue() == "--- prompt 1 of 3\nA:xyz\n--- prompt 2 of 3\nB:12\n"
    display.update(delta(2, "", is_last=True))
    assert out.getvalue().endswith("B:12\n--- prompt 3 of 3\nC:\n")


def test_outputs_of_a_prompt_print_in_order() -> None:
    out = io.StringIO()
    display = OrderedPrinter(["A:"], 2, out)
    display.update(delta(0, "second", index=1, is_last=True))
    assert out.getvalue() == ""
    display.update(delta(0, "first", is_last=True))
    assert out.getvalue() == (
        "--- prompt 1 of 1, output 1 of 2\nA:first\n--- prompt 1 of 1, output 2 of 2\nA:second\n"
    )


def test_single_prompt_has_no_heading() -> None:
    out = io.StringIO()
    OrderedPrinter(["A "], 1, out).update(delta(0, "b", is_last=True))
    assert out.getvalue() == "A b\n"
