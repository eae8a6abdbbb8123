# SPDX-License-Identifier: Apache-2.0
"""Outputs of generation: the terminal in the order of the prompts, and the JSON file."""

import io
import json
import re
from pathlib import Path

import pytest

from megatron.inference import TextDelta, TextOutput
from megatron.inference.generate import OrderedPrinter, check_json_path, write_json

OUTPUT = TextOutput(
    prompt='say "ü"\n',
    prompt_ids=(5, 6),
    text="ß\u2028",
    ids=(7, 8, 0),
    logprobs=(-0.1, -2.5, -1e-9),
    finish_reason="stop",
)


def test_json_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "out.json"
    check_json_path(path)
    write_json(path, [OUTPUT, OUTPUT])
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") == 4
    output_0, output_1 = json.loads(text)
    assert output_0 == output_1
    assert output_0 == {
        "prompt": 'say "ü"\n',
        "prompt_ids": [5, 6],
        "index": 0,
        "text": "ß\u2028",
        "ids": [7, 8, 0],
        "logprobs": [-0.1, -2.5, -1e-9],
        "finish_reason": "stop",
    }
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


def test_invalid_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        check_json_path(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out.json.*file"):
        check_json_path(tmp_path / "file" / "out.json")
    with pytest.raises(ValueError, match=r"absent.*out.json"):
        write_json(tmp_path / "absent" / "out.json", [OUTPUT])


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
