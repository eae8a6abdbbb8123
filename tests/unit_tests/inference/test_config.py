# SPDX-License-Identifier: Apache-2.0
"""Options of generation: any number of prompts of any text, invalid values, prompt files."""

from pathlib import Path

import pytest

from megatron.inference.generate import Prompts, parse_arguments, read_prompts, split_prompts


def parse(*words: str):
    return parse_arguments(words, prog="generate")


def test_prompts_repeat_and_may_be_any_text() -> None:
    config = parse(
        *("--load", "x", "--prompt", "Hello, wörld", "--top-k", "3"),
        *("--prompt", "--dashes", "--prompt=a=b", "--prompt", ""),
    )
    assert config.prompts.prompt == ("Hello, wörld", "--dashes", "a=b", "")
    assert config.sampling.top_k == 3
    assert split_prompts(["--prompt-file", "f", "--promptly"]) == (
        (),
        ["--prompt-file", "f", "--promptly"],
    )


def test_command_line_prompts_override_config_file_prompts(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text("load: x\nprompt: [one, two]\ntop-p: 1e-1\n", encoding="utf-8")
    assert parse("--config", str(file)).prompts.prompt == ("one", "two")
    assert parse("--config", str(file)).sampling.top_p == 0.1
    assert parse("--config", str(file), "--prompt", "three").prompts.prompt == ("three",)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--prompt", "a"], "--load"),
        (["--load", "x", "--prompt"], "--prompt"),
        (["--load", "x", "--prompt", "a", "b"], "'b'"),
        (["--load", "x", "--temperatur", "1"], "--temperature"),
        (["--load", "x", "--top-k", "many"], "--top-k .*'many'"),
        (["--load", "x", "--max-new-tokens", "0"], "--max-new-tokens .*0"),
        (
            ["--load", "x", "--batch-invariant", "--transformer-impl", "inference_optimized"],
            "--batch-invariant .*inference_optimized",
        ),
        (
            ["--load", "x", "--batch-invariant", "--tensor-model-parallel-size", "4"],
            "--tensor-model-parallel-size 4",
        ),
        (["--load", "x", "--inference-max-requests", "-1"], "--inference-max-requests .*-1"),
        (["--load", "x", "--inference-max-tokens", "0"], "--inference-max-tokens .*0"),
        (["--load", "x", "--inference-block-size", "24"], "--inference-block-size .*24"),
        (["--load", "x", "--chat", "--output-json", "y"], "--output-jsonl"),
        (["--load", "x", "--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size .*0"),
    ],
)
def test_invalid_arguments_are_one_line(words: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        parse(*words)
    assert "\n" not in str(caught.value)


def test_prompts_are_read_from_command_line_then_from_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first line\r\n\n  indented ü\n\t\nlast", encoding="utf-8")
    prompts = Prompts(prompt=("before",), prompt_file=str(file))
    assert read_prompts(prompts) == ["before", "first line", "  indented ü", "last"]


def test_missing_prompt_or_prompt_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prompt"):
        read_prompts(Prompts())
    with pytest.raises(ValueError, match=r"--prompt-file .*none.txt"):
        read_prompts(Prompts(prompt_file=str(tmp_path / "none.txt")))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"--prompt-file .*binary"):
        read_prompts(Prompts(prompt_file=str(tmp_path / "binary")))
