# SPDX-License-Identifier: Apache-2.0
"""Options of block types that a layer pattern lacks, and options derived from the pattern."""

from __future__ import annotations

import pytest

from megatron.cli.launch import Launch
from megatron.training import pretrain_gpt
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.pretrain_gpt import PRETRAIN_GPT, read_run
from megatron.training.pretrain_hybrid import PRETRAIN_HYBRID
from tests.unit_tests.training.test_hybrid_options import (
    CP,
    DELTA,
    HEADS,
    MAMBA,
    PATTERN,
    RUN_FLAGS,
    hybrid_run,
)

#: Options of attention and of MLPs, for runs without these blocks.
NO_ATTENTION = """--num-attention-heads 6|--group-query-attention|--num-query-groups 2
--kv-channels 16|--add-qkv-bias|--add-attention-output-bias|--attention-dropout 0.2|--qk-layernorm
--attention-output-gate|--window-size 5|--softmax-type learnable
--q-lora-rank 8|--kv-lora-rank 8|--mscale 2.0|--rotary-base 5000.0|--rotary-percent 0.5
--rotary-interleaved|--rotary-seq-len-interpolation-factor 2.0|--rope-scaling-factor 4.0
--softmax-scale 0.25|--attn-logit-softcapping 2.0
--yarn-beta-fast 16.0|--cp-comm-type p2p|--attention-backend reference|--attention-backend triton
--use-rope-scaling""".replace("\n", "|").split("|")
NO_MLP = ("--swiglu", "--squared-relu", "--add-mlp-bias")


@pytest.mark.parametrize(
    ("model", "options", "world", "noun"),
    [
        (f"{PATTERN} GM-", NO_ATTENTION[:-2], 1, "attention"),
        (f"{PATTERN} GM-", NO_ATTENTION[-2:], 1, "attention"),
        (f"{PATTERN} M {CP} 2", NO_ATTENTION[-4:-2], 2, "attention"),
        (f"{PATTERN} GM* {HEADS} 6", NO_MLP[:1], 1, "MLP"),
        (f"{PATTERN} GM* {HEADS} 6", NO_MLP[1:], 1, "MLP"),
    ],
)
def test_options_of_absent_block_types_are_refused(model, options, world, noun):
    blocks = model.split()[1]
    delta = DELTA if "G" in blocks else ""
    with pytest.raises(ValueError, match="has no effect") as caught:
        hybrid_run(f"{model} {MAMBA} {delta} {' '.join(options)}", world)
    reason = f"has no effect: {PATTERN} {blocks} has no {noun}: drop it"
    assert sorted(str(caught.value).split("; ")) == sorted(f"{name} {reason}" for name in options)


def test_unused_mlp_width_next_to_expert_width_is_reported(capsys):
    experts = "--num-experts 4 --disable-bias-linear --swiglu --ffn-hidden-size 64"
    run = hybrid_run(f"{PATTERN} ME {MAMBA} {experts}")
    assert gpt_config(run.config, 61).moe.ffn_hidden_size == 64
    assert resolve(run.config, 1) == run, "the resolved run writes both widths"
    assert "--ffn-hidden-size" not in capsys.readouterr().err
    run = hybrid_run(f"{PATTERN} ME {MAMBA} {experts} --moe-ffn-hidden-size 32")
    assert gpt_config(run.config, 61).moe.ffn_hidden_size == 32
    assert "no effect here: --ffn-hidden-size 64 " in capsys.readouterr().err
    hybrid_run(f"{PATTERN} GM* {MAMBA} {DELTA} {HEADS} 6 --ffn-hidden-size 64")
    assert "no effect here: --ffn-hidden-size 64 " in capsys.readouterr().err


def test_options_with_neutral_values_are_accepted():
    flags = "--attention-dropout 0 --cp-comm-type auto --no-swiglu --no-qk-layernorm"
    run = hybrid_run(f"{PATTERN} MM {MAMBA} {flags} --window-size none --ffn-hidden-size 192")
    assert run.config.attention.attention_dropout == 0.0


def test_missing_options_include_pattern_but_not_derived_ones():
    for words, missing in (
        ("", f"{PATTERN}, --hidden-size, "),
        (f"{PATTERN} G-", "--hidden-size, "),
        ("--num-layers 2", f"{PATTERN}, --hidden-size, "),
        (RUN_FLAGS, f"{PATTERN}: give it$"),
    ):
        with pytest.raises(ValueError, match=f"^missing {missing}") as caught:
            read_run(words.split(), Launch(), program=PRETRAIN_HYBRID)
        assert "--num-layers" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^missing --num-layers, --hidden-size, "):
        read_run([], Launch(), program=PRETRAIN_GPT)


@pytest.mark.parametrize("factor", ["--mlp-output-multiplier 2", "--mlp-gate-multiplier 2"])
def test_factors_of_mlps_are_refused_if_all_layers_have_experts(factor, capsys):
    model = "--num-layers 2 --hidden-size 24 --num-attention-heads 2 --vocab-size 61 --swiglu"
    run = "--mock-data --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --print-config"
    experts = "--num-experts 4 --disable-bias-linear"
    assert pretrain_gpt.main(f"{model} {run} {experts} {factor}".split(), {}) == 2
    assert f"{factor.split()[0]} has no effect without a layer with" in capsys.readouterr().err
    assert pretrain_gpt.main(f"{model} {run} {factor}".split(), {}) == 0
