# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron that training accepts without effect, and those that it has to refuse."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.cli.flags import KINDS, HelpRequested, parse_command_line
from megatron.cli.launch import Launch
from megatron.training.config import Config
from megatron.training.config.megatron_flags import MEGATRON_FLAGS, NO_EFFECT
from megatron.training.config.model_table import gpt_config
from megatron.training.pretrain_gpt import read_run
from tests.support.arguments import last_wins
from tests.unit_tests.training import small_config as small
from tests.unit_tests.training.small_config import small_config

ARGUMENTS = small.ARGUMENTS
TWELVE = (
    "--use-mcore-models --attention-softmax-in-fp32 --ckpt-format torch_dist "
    "--distributed-backend nccl --log-timers-to-tensorboard --timing-log-level 0 "
    "--log-memory-to-tensorboard --no-gradient-accumulation-fusion --no-rope-fusion "
    "--use-persistent-ckpt-worker --moe-grouped-gemm --dist-ckpt-strictness log_all"
)


def parse(text: str, said: list[str]) -> Config:
    line = parse_command_line(
        Config,
        last_wins([*ARGUMENTS.split(), *text.split()]),
        prog="p",
        description="d",
        no_effect=MEGATRON_FLAGS,
    )
    said += line.notes
    return line.config


def given(flag) -> str:
    """Return the flag with a value that has no effect."""
    if not flag.values:
        return f"--{flag.name}"
    value = {"INT": "1", "FLOAT": "0.5", "TEXT": "a"}.get(flag.values, flag.values.split("|")[0])
    return f"--{flag.name} {value}"


def test_flags_without_effect_are_listed_once_and_change_nothing():
    said: list[str] = []
    assert parse(TWELVE, said) == small_config()
    assert said[0].startswith("no effect here: ")
    listed = said[0].replace(",", "").replace("(", "").split()
    flags = [word for word in TWELVE.split() if word.startswith("--")]
    assert sorted(word for word in listed if word.startswith("--")) == sorted(flags)
    for kind in KINDS:
        assert f"({kind})" in said[0]
    assert [line.split()[:2] for line in said[1:]] == [
        ["--ckpt-format", "torch_dist:"],
        ["--dist-ckpt-strictness", "log_all:"],
    ]


def test_they_are_keys_of_a_file_too(tmp_path):
    (tmp_path / "run.yaml").write_text("use_mcore_models: true\ntiming-log-level: 1\n")
    said: list[str] = []
    assert parse(f"--config {tmp_path / 'run.yaml'}", said) == small_config()
    assert "--use-mcore-models" in said[0]
    assert "--timing-log-level" in said[0]


def test_only_rank_0_lists_them(capsys):
    words = [*ARGUMENTS.split(), "--tensor-model-parallel-size", "2", "--use-mcore-models"]
    for rank in (1, 0):
        read_run(words, Launch(rank=rank, world_size=2))
        assert ("--use-mcore-models" in capsys.readouterr().err) == (rank == 0)


@pytest.mark.parametrize("flag", NO_EFFECT, ids=lambda flag: flag.name)
def test_each_row_is_accepted_unless_all_that_has_no_effect_is_refused(flag):
    said: list[str] = []
    assert parse(given(flag), said) == small_config()
    assert f"--{flag.name} ({flag.kind})" in said[0]
    with pytest.raises(ValueError, match=f"--{flag.name} has no effect here"):
        parse(f"{given(flag)} --strict-flags", said)


@pytest.mark.parametrize(
    "text",
    [
        "--ckpt-format torch",
        "--distributed-backend gloo",
        "--moe-router-dtype fp64",
        "--dist-ckpt-strictness ignore_all",
        "--main-grads-dtype bf16",
        "--main-params-dtype fp16",
        "--muon-tp-mode blockwise",
        "--muon-tp-mode distributed",
        "--timing-log-level high",
        "--use-mcore-models false",
        "--no-use-mcore-models",
        "--rope-fusion",
        "--accumulate-allreduce-grads-in-fp32 --bf16 --grad-reduce-in-bf16",
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
    ],
)
def test_a_value_with_an_effect_is_refused(text):
    with pytest.raises(ValueError, match=text.split()[0]):
        parse(text, [])


def test_a_switch_that_a_file_turns_off_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("no-rope-fusion: false\n")
    with pytest.raises(ValueError, match="no-rope-fusion is false: leave it out"):
        parse(f"--config {tmp_path / 'run.yaml'}", [])


def test_they_are_no_options_and_not_in_help():
    assert not {flag.name for flag in NO_EFFECT} & {
        field.name.replace("_", "-")
        for section in dataclasses.fields(small_config())
        for field in dataclasses.fields(getattr(small_config(), section.name))
    }
    with pytest.raises(HelpRequested) as caught:
        parse("--help", [])
    assert not [flag.name for flag in NO_EFFECT if f"--{flag.name} " in caught.value.text]


#: What would train another model, on other data, in another precision, or at another rate; and what
#: would change when a run stops, resumes, skips or writes.
REFUSED = """
--fp8-param-gather --fp4-recipe custom --fp8-wgrad --fp16-lm-cross-entropy
--no-position-embedding --openai-gelu --quick-geglu --glu-linear-offset 1.0 --onnx-safe
--activation-func-clamp-value 7.0 --apply-residual-connection-post-layernorm
--fp32-residual-connection --rotary-scaling-factor 40 --window-attn-skip-freq 2
--init-method-xavier-uniform --embedding-init-method-std 0.1 --no-initialization
--data-parallel-random-init --use-legacy-models --spec local --mtp-use-repeated-layer
--moe-latent-size 8 --moe-apply-probs-on-input --moe-router-topk-limited-devices 2
--moe-router-force-load-balancing --moe-router-padding-for-quantization
--experimental-attention-variant dsa --linear-attention-freq 3 --dsa-indexer-topk 8
--use-mup --apply-wd-to-qk-layernorm --no-weight-decay-cond-type qk_layernorm
--lr-decay-tokens 8 --adam-decoupled --decrease-batch-size-if-needed --use-precision-aware-optimizer
--vocab-extra-ids 100 --tokenizer-metadata a --fim-data --fim-rate 0.5
--full-validation --skip-train --test-mode --data-sharding
--create-attention-mask-in-dataloader --override-lr-scheduler
--no-check-for-nan-in-loss-and-grad --check-for-spiky-loss --check-for-large-grads
--error-injection-rate 100 --iterations-to-skip 3 --train-sync-interval 5 --adlr-autoresume
--exit-signal-handler-for-dataloader --ckpt-step 3
--exit-on-missing-checkpoint --non-persistent-save-interval 5 --load-main-params-from-ckpt
--ckpt-convert-format torch --perform-rl-step --retro-project-dir r --encoder-num-layers 2
--heterogeneous-layers-config-path h --use-torch-fsdp2 --recompute-modules mlp --offload-modules mlp
"""


@pytest.mark.parametrize("text", [f"--{t.strip()}" for t in REFUSED.split("--")[1:]])
def test_a_flag_whose_result_would_differ_stays_refused(text):
    name = text.split()[0]
    with pytest.raises(ValueError, match=name) as caught:
        parse(text, [])
    assert "no effect" not in str(caught.value)


def test_positions_that_a_script_leaves_out_are_those_of_megatron():
    words = [*small.ARGUMENTS.removesuffix(" --position-embedding-type rope").split()]
    run = read_run([*words, "--use-mcore-models", "--max-position-embeddings", "32"], Launch())
    model = gpt_config(run.config, 61)
    assert (model.rope, model.max_position_embeddings) == (None, 32)
    rotary = read_run([*words, "--use-rotary-position-embeddings"], Launch())
    assert gpt_config(rotary.config, 61).max_position_embeddings is None
