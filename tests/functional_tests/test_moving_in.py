# SPDX-License-Identifier: Apache-2.0
"""Migration: upstream scripts with unchanged flags, and a tiktoken vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.inference.generate import main as generate
from megatron.training import pretrain_gpt
from megatron.training.preprocess_data import _main as preprocess
from tests.functional_tests.small_run import flags, run_in_process
from tests.support.tiktoken_files import TEXTS, TOKENS, write_vocabulary
from tests.unit_tests.training.test_upstream_scripts import REFUSED, SECOND_FIXES, read_script


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "train_gpt3_175b_distributed",
            "num-layers: 96|hidden-size: 12288|position-embedding-type: learned_absolute|"
            "fp16: true|pipeline-model-parallel-size: 16|lr-decay-iters: 430000",
        ),
        (
            "train_llama3_8b_h100_fp8",
            "num-layers: 32|num-query-groups: 8|rotary-base: 1000000.0|bf16: true|"
            "apply-layernorm-1p: true|context-parallel-size: 2|train-samples: 1953125000",
        ),
    ],
)
def test_upstream_script_prints_its_configuration(
    script: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world, script_flags = read_script(script)
    removed = {*REFUSED[script], *SECOND_FIXES.get(script, {})}
    words = [word for flag in script_flags if flag[0] not in removed for word in flag]
    launch = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert pretrain_gpt.main([*words, "--print-config"], launch) == 0
    printed = capsys.readouterr().out.replace('"', "").splitlines()
    assert set(expected.split("|")) <= set(printed)


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
