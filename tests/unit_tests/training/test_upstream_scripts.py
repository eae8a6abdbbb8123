# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM's example scripts: which of them have to go, and that the rest is a run."""

from __future__ import annotations

import re

import pytest

from megatron.cli.launch import Launch
from megatron.training.config.model_table import gpt_config
from megatron.training.pretrain_gpt import read_run
from tools.upstream_flags import FOLDER

#: Flags of each script that are refused, and what each answer says.
REFUSED = {
    "train_gpt3_175b_distributed": {},
    "train_llama3_8b_h100_fp8": {
        "--fp8-format": "bf16",
        "--fp8-amax-history-len": "bf16",
        "--fp8-amax-compute-algo": "bf16",
        "--fp8-param-gather": "bf16",
        "--tiktoken-pattern": "--tokenizer-model",
    },
    "train_mixtral_8x7b_distributed": {"--no-position-embedding": "--position-embedding-type"},
}

#: What the rest is refused for, all at once: flags that Megatron-LM changes by itself, or files.
THEN = {
    "train_gpt3_175b_distributed": (),
    "train_llama3_8b_h100_fp8": (),
    "train_mixtral_8x7b_distributed": ("--sequence-parallel",),
}


def flags_of(script: str) -> tuple[int, list[list[str]]]:
    """Return for how many GPUs a script is, and its flags with their values."""
    text = (FOLDER / "scripts" / f"{script}.txt").read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    found = [flag.split() for flag in re.split(r"\s(?=--)", rest.strip())]
    return int(first.split()[1]), found


@pytest.mark.parametrize("script", REFUSED)
def test_a_script_parses_but_for_what_is_named(script):
    world, found = flags_of(script)
    launch = Launch(world_size=world)
    answers: list[str] = []
    try:
        read_run([word for flag in found for word in flag], launch)
    except ValueError as error:
        answers = str(error).split("; ")
    assert len(answers) == len(REFUSED[script])
    for (name, fix), answer in zip(REFUSED[script].items(), answers, strict=True):
        assert answer.startswith(name)
        assert fix in answer
    gone = {*REFUSED[script], *THEN[script]}
    kept = [word for flag in found if flag[0] not in gone for word in flag]
    run = read_run(kept, launch)
    assert run.config.training.global_batch_size in (128, 256, 1536)
    if "gpt3" in script:
        assert gpt_config(run.config, 50257).max_position_embeddings == 2048
    for problem in THEN[script]:
        with pytest.raises(ValueError, match=problem):
            read_run([*kept, problem], launch)
