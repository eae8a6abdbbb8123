# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM's example scripts: the refused flags, and a run of the other flags."""

from __future__ import annotations

import re

import pytest

from megatron.cli.launch import Launch
from megatron.training.config.model_table import gpt_config
from megatron.training.pretrain_gpt import PRETRAIN_GPT, read_run
from megatron.training.pretrain_hybrid import PRETRAIN_HYBRID
from tests.support.upstream_flags import FOLDER

#: Refused flags of each script, and a part of each error message.
REFUSED: dict[str, dict[str, str]] = {
    "train_gpt3_175b_distributed": {},
    "train_llama3_8b_h100_fp8": {
        "--fp8-param-gather": "bf16",
    },
    "train_mixtral_8x7b_distributed": {},
}

REFUSED |= {
    "train_mamba_800m": {
        "--hybrid-attention-ratio": "--hybrid-layer-pattern",
        "--hybrid-mlp-ratio": "--hybrid-layer-pattern",
        "--spec": "--hybrid-layer-pattern",
    },
    "train_gptoss_20b": {
        "--export-force-local-attention": "--transformer-impl",
        "--enable-gpt-oss": "--load-hf",
        "--disable-bf16-reduced-precision-matmul": "--bf16",
        "--fp8-param-gather": "bf16",
    },
    "train_bert_340m_distributed": {},
    "train_t5_220m_distributed": {
        "--encoder-num-layers": "encoder-decoder models, which are not supported",
        "--decoder-num-layers": "encoder-decoder models, which are not supported",
        "--encoder-seq-length": "encoder-decoder models, which are not supported",
        "--decoder-seq-length": "encoder-decoder models, which are not supported",
        "--vocab-extra-ids": "--tokenizer-model",
        "--tokenizer-type": "tokenizer.json",
    },
}

FP8 = {"--fp8-format": "", "--fp8-amax-history-len": "", "--fp8-amax-compute-algo": ""}
#: Problems that remain after the refused flags are removed, by flag, with replacement words: flags
#: that Megatron-LM changes by itself, layers that do not divide there either, and values that the
#: removed flags provided.
SECOND_FIXES: dict[str, dict[str, str]] = {
    # TransformerEngine, which FP8 needs, is not installed.
    "train_llama3_8b_h100_fp8": FP8,
    "train_t5_220m_distributed": {"--transformer-impl": ""},
    "train_gptoss_20b": {
        "--transformer-impl": "",
        **FP8,
        "--pipeline-model-parallel-size": "--pipeline-model-parallel-size 4",
    },
    # No flag marks a script of pretrain_bert.py, and 24 layers do not divide into 16 stages.
    "train_bert_340m_distributed": {
        "--pipeline-model-parallel-size": "--pipeline-model-parallel-size 8"
    },
}
#: Replacements for refused flags that a model needs.
REPLACEMENTS = {
    "train_mamba_800m": "--hybrid-layer-pattern " + "M-M-M-M*" * 6,
    "train_t5_220m_distributed": "--num-layers 12 --seq-length 512 --tokenizer-type hf",
}


def read_script(script: str) -> tuple[int, list[list[str]]]:
    """Return a script's number of GPUs, and its flags with their values."""
    text = (FOLDER / "scripts" / f"{script}.txt").read_text(encoding="utf-8")
    header, _, body = text.partition("\n")
    flags = [flag.split() for flag in re.split(r"\s(?=--)", body.strip())]
    return int(header.split()[1]), flags


@pytest.mark.parametrize("script", REFUSED)
def test_upstream_script_runs_without_refused_flags(script):
    world, flags = read_script(script)
    launch = Launch(world_size=world)
    answers: list[str] = []
    try:
        read_run([word for flag in flags for word in flag], launch)
    except ValueError as error:
        answers = str(error).split("; ")
    if not REFUSED[script]:
        answers = [
            answer
            for answer in answers
            if not answer.startswith(tuple(SECOND_FIXES.get(script, {})))
        ]
    assert len(answers) == len(REFUSED[script])
    for (name, fix), answer in zip(REFUSED[script].items(), answers, strict=True):
        assert answer.startswith(name)
        assert fix in answer
    removed = {*REFUSED[script], *SECOND_FIXES.get(script, {})}
    accepted = [word for flag in flags if flag[0] not in removed for word in flag]
    accepted += REPLACEMENTS.get(script, "").split()
    flag_by_name = {flag[0]: flag for flag in flags}
    second_fixes = SECOND_FIXES.get(script, {})
    program = PRETRAIN_HYBRID if "mamba" in script else PRETRAIN_GPT
    run = read_run([*accepted, *" ".join(second_fixes.values()).split()], launch, program=program)
    batch = int(flag_by_name["--global-batch-size"][1])
    assert run.config.training.global_batch_size == batch
    if "gpt3" in script:
        assert gpt_config(run.config, 50257).max_position_embeddings == 2048
        assert run.batch_sizes.stages[:2] == ((0, 16), (61678, 32))
        assert run.batch_sizes.stages[-1] == (5859375, 1536)
    for problem in second_fixes:
        other_fixes = [words for name, words in second_fixes.items() if name != problem]
        words = [*accepted, *flag_by_name[problem], *" ".join(other_fixes).split()]
        with pytest.raises(ValueError, match=problem):
            read_run(words, launch, program=program)
