# SPDX-License-Identifier: Apache-2.0
"""Migration: upstream scripts with unchanged flags, and a tiktoken vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.inference.generate import main as generate
from megatron.training.preprocess_data import _main as preprocess
from tests.functional_tests.small_run import flags, run_in_process
from tests.support.tiktoken_files import TEXTS, TOKENS, write_vocabulary


def test_tiktoken_vocabulary_works_from_text_to_generation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary, prefix = write_vocabulary(tmp_path / "vocab.json"), tmp_path / "data"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": " ".join(TEXTS * 9)}) + "\n")
    kind = (
        f"--tokenizer-type TikTokenizer --tokenizer-model {vocabulary} --tiktoken-pattern v1 "
        "--tiktoken-num-special-tokens 12"
    )
    preprocess(f"--input {tmp_path}/a.jsonl --output-prefix {prefix} --append-eod {kind}".split())
    saved = f"{tmp_path}/saved"
    words = "--lr-warmup-iters 0 --eval-interval 0 --split 100"
    start_flags = f"{words} {kind} --train-iters 2 --save {saved}"
    assert run_in_process(flags(prefix, start_flags, without=("--vocab-size",))) == 0
    # A checkpoint describes its tokenizer for a run that gives no tokenizer.
    resume_flags = (
        f"{words} --load {saved} --use-checkpoint-args --train-iters 3 --save {tmp_path}/more"
    )
    assert run_in_process(flags(prefix, resume_flags, without=("--vocab-size",))) == 0
    capsys.readouterr()
    output_path = f"{tmp_path}/out.json"
    words = "--prompt the --max-new-tokens 3 --temperature 0 --output-json"
    assert generate([*f"--load {saved} {words}".split(), output_path], {}) == 0
    (generated,) = json.loads(Path(output_path).read_text())
    assert generated["prompt_ids"] == [12 + TOKENS.index(b"the")]
    vocabulary.write_text("[]")
    assert generate([*f"--load {saved} {words}".split(), output_path], {}) == 2
    assert "vocab.json is not a tiktoken vocabulary" in capsys.readouterr().err
