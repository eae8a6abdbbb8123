# SPDX-License-Identifier: Apache-2.0
"""The JSON file of outputs: its content, atomic writes, and early errors of invalid paths."""

import json
import re
from pathlib import Path

import pytest

from megatron.inference import TextOutput
from megatron.inference.generate import check_json_path, write_json

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
