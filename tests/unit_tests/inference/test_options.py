# SPDX-License-Identifier: Apache-2.0
"""Each option of generation has its documented effect, from the command line on."""

from __future__ import annotations

import io
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.inference.generate import main
from tests.support.arguments import last_wins
from tests.support.commands import refusal, run

PROMPTS = ["ab", "there is a tale of two", "there is a tale of tea"]


def generate(root: Path, *words: str) -> tuple[list[dict[str, Any]], str, str]:
    """Return the outputs, stdout and stderr."""
    path = root.with_name("out.json")
    defaults = [
        *("--load", str(root), "--device", "cpu", "--max-new-tokens", "16"),
        *("--temperature", "0.8", "--seed", "5", "--output-json", str(path)),
    ]
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    code, out, err, _ = run(main, [*prompts, *last_wins([*defaults, *words])])
    assert code == 0, err
    return json.loads(path.read_text(encoding="utf-8")), out, err


def ids(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["ids"] for output in outputs]


@pytest.mark.parametrize(
    "words",
    ["--min-p 0.2", "--repetition-penalty 3", "--presence-penalty 2", "--frequency-penalty 2"]
    + ["--seed 6", "--top-k 2", "--top-p 0.2", "--temperature 3", "--stop e"],
)
def test_sampling_options_change_tokens(root: Path, words: str) -> None:
    plain, _, _ = generate(root)
    changed, _, _ = generate(root, *words.split())
    if words == "--stop e":
        plain_texts = [output["text"] for output in plain]
        assert [r["text"] for r in changed] == [text.split("e")[0] for text in plain_texts]
    else:
        assert ids(changed) != ids(plain)


@pytest.mark.parametrize(
    "words",
    [
        "--inference-max-requests 1",
        "--inference-max-tokens 3",
        "--inference-block-size 64",
        "--inference-memory-gb 0.00002",
        "--no-prefix-caching",
    ],
)
def test_engine_sizes_do_not_change_tokens(root: Path, words: str) -> None:
    plain, _, log = generate(root)
    changed, _, changed_log = generate(root, *words.split())
    assert ids(changed) == ids(plain)
    # Steps, computed tokens, prefix hits or preemptions differ.
    assert log.splitlines()[-1] != changed_log.splitlines()[-1]


def test_outputs_of_a_prompt_differ_and_are_grouped(root: Path) -> None:
    outputs, out, _ = generate(root, "--num-outputs", "3")
    assert [(r["prompt"], r["index"]) for r in outputs] == [
        (text, index) for text in PROMPTS for index in range(3)
    ]
    assert len({tuple(tokens) for tokens in ids(outputs)}) == 9
    assert "--- prompt 2 of 3, output 3 of 3" in out


def test_json_lines_equal_the_json_list(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    flags = ("--logprobs", "3", "--prompt-logprobs", "--output-jsonl", str(path))
    outputs, _, _ = generate(root, *flags)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert sorted(lines, key=lambda r: PROMPTS.index(r["prompt"])) == outputs
    for output in outputs:
        assert [len(tops) for tops in output["top_logprobs"]] == [3] * len(output["ids"])
        for tops in output["top_logprobs"]:
            assert sum(math.exp(value) for _, value in tops) <= 1 + 1e-6
        assert len(output["prompt_logprobs"]) == len(output["prompt_ids"]) - 1


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--top-p", "0"], "top-p"),
        (["--min-p", "2"], "min-p"),
        (["--repetition-penalty", "0"], "repetition-penalty"),
        (["--logprobs", "21", "--output-jsonl", "x"], "logprobs"),
        (["--stop", ""], "stop"),
        (["--inference-memory-gb", "1e-6"], "1,000 bytes"),
        (["--output-jsonl", "."], "--output-jsonl ."),
        (["--chat-template", "plain"], "--chat-template"),
        (["--logprobs", "2"], "--logprobs"),
        (["--prompt-logprobs"], "--prompt-logprobs"),
        (["--chat", "--num-outputs", "2"], "--num-outputs"),
    ],
)
def test_invalid_options_are_one_line(root: Path, words: list[str], value: str) -> None:
    words = ["--prompt", "a", "--load", str(root), "--device", "cpu", *words]
    assert value in refusal(run(main, words))


def test_chat_answers_each_turn_with_its_history(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("and then?\n\nwhy\n"))
    line = f"--load {root} --device cpu --chat --chat-template plain --prompt hi --max-new-tokens 4"
    line += f" --temperature 0 --output-jsonl {path} --inference-block-size 16"
    code, out, err, _ = run(main, line.split())
    assert code == 0, err
    turns = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [turn["text"] in out for turn in turns] == [True] * 3
    for before, after in pairwise(turns):
        assert after["prompt"].startswith(before["prompt"])
        assert before["text"] in after["prompt"]
    assert "why" in turns[-1]["prompt"]
    assert "from a conversation" in err
    assert "prefix cache" in err
