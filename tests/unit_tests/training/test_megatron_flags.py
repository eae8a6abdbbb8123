# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM that training accepts without effect, and flags that it must refuse."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import fields

import pytest

from megatron.cli.flags import KINDS, HelpRequested, parse_command_line
from megatron.cli.launch import Launch
from megatron.cli.schema import suggest
from megatron.core.extensions import transformer_engine_problem
from megatron.core.models.gpt import logical_weights
from megatron.training.checkpointing.stored_model import stored_options
from megatron.training.config import Config
from megatron.training.config.megatron_flags import NO_EFFECT, accepted_flags
from megatron.training.config.model_table import gpt_config
from megatron.training.pretrain_gpt import read_run
from tests.support.arguments import last_wins
from tests.unit_tests.training import small_config as base_config
from tests.unit_tests.training.small_config import small_config

ARGUMENTS = base_config.ARGUMENTS


def parse(text: str, notes: list[str]) -> Config:
    line = parse_command_line(
        Config,
        last_wins([*ARGUMENTS.split(), *text.split()]),
        prog="p",
        description="d",
        accepted=accepted_flags(stored_options),
    )
    notes += line.notes
    return line.config


def neutral_argument(flag) -> str:
    """Return the flag with a value that has no effect."""
    if not flag.values:
        return f"--{flag.name}"
    value = {"INT": "1", "FLOAT": "0.5", "TEXT": "a"}.get(flag.values, flag.values.split("|")[0])
    return f"--{flag.name} {value}"


@pytest.mark.parametrize("prefix", ["", "no-"])
def test_flags_without_effect_are_accepted_unless_strict(prefix):
    names = {flag.name for flag in NO_EFFECT}
    switches = {name for name in names if f"no-{name}" in names}  # the later of two would win
    flags = [flag for flag in NO_EFFECT if flag.name not in {prefix + name for name in switches}]
    notes: list[str] = []
    text = " ".join(neutral_argument(flag) for flag in flags)
    assert parse(text, notes) == small_config()
    groups = re.findall(r"((?:--[\w-]+ )+)\(([a-z ]+)\)", notes[0])
    kinds = {flag: kind for flags, kind in groups for flag in flags.split()}
    assert kinds == {f"--{flag.name}": flag.kind for flag in flags}
    assert set(kinds.values()) == set(KINDS)
    with pytest.raises(ValueError) as caught:
        parse(f"{text} --strict-flags", [])
    reported = re.findall(r"(--[\w-]+) has no effect here", str(caught.value))
    assert sorted(reported) == sorted(kinds)


def test_flags_without_effect_are_accepted_in_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("use_mcore_models: true\ntiming-log-level: 1\n")
    notes: list[str] = []
    assert parse(f"--config {tmp_path / 'run.yaml'}", notes) == small_config()
    assert "--use-mcore-models" in notes[0]
    assert "--timing-log-level" in notes[0]


def test_only_rank_0_lists_flags_without_effect(capsys):
    words = [*ARGUMENTS.split(), "--tensor-model-parallel-size", "2", "--use-mcore-models"]
    for rank in (1, 0):
        read_run(words, Launch(rank=rank, world_size=2))
        assert ("--use-mcore-models" in capsys.readouterr().err) == (rank == 0)


@pytest.mark.parametrize(
    "text",
    [
        "--ckpt-format tar",
        "--train-mode finetune",
        "--dataset JSON-SFT",
        "--no-position-embedding --position-embedding-type learned_absolute",
        "--gtp-remat-nccl-ub --bf16 --grad-reduce-in-bf16",
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
def test_value_with_an_effect_is_refused(text):
    with pytest.raises(ValueError, match=text.split()[0]):
        parse(text, [])


def test_switch_turned_off_in_a_file_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("no-rope-fusion: false\n")
    with pytest.raises(ValueError, match="no-rope-fusion is false: leave it out"):
        parse(f"--config {tmp_path / 'run.yaml'}", [])


def test_flags_without_effect_are_not_in_the_help():
    assert not {flag.name for flag in NO_EFFECT} & {
        field.name.replace("_", "-")
        for section in dataclasses.fields(small_config())
        for field in dataclasses.fields(getattr(small_config(), section.name))
    }
    with pytest.raises(HelpRequested) as caught:
        parse("--help", [])
    assert not [flag.name for flag in NO_EFFECT if f"--{flag.name} " in caught.value.text]


#: Flags that would change the model, the data, the precision or the schedule, and flags that would
#: change when a run stops, resumes, skips or writes.
REFUSED = """
--fp8-param-gather --fp4-recipe custom --fp8-wgrad --fp16-lm-cross-entropy
--onnx-safe --apply-residual-connection-post-layernorm --fp32-residual-connection
--init-method-xavier-uniform --embedding-init-method-std 0.1 --no-initialization
--data-parallel-random-init --use-legacy-models --spec local --mtp-use-repeated-layer
--moe-latent-size 8 --moe-apply-probs-on-input --moe-router-topk-limited-devices 2
--moe-router-force-load-balancing --moe-router-padding-for-quantization
--experimental-attention-variant dsa --linear-attention-freq 3 --dsa-indexer-topk 8
--use-mup --apply-wd-to-qk-layernorm --no-weight-decay-cond-type qk_layernorm
--lr-decay-tokens 8 --adam-decoupled --decrease-batch-size-if-needed
--vocab-extra-ids 100 --tokenizer-metadata a --fim-data --fim-rate 0.5
--full-validation --skip-train --test-mode --data-sharding
--create-attention-mask-in-dataloader --override-lr-scheduler
--check-for-spiky-loss --check-for-large-grads
--error-injection-rate 100 --iterations-to-skip 3 --train-sync-interval 5 --adlr-autoresume
--exit-signal-handler-for-dataloader --ckpt-step 3
--exit-on-missing-checkpoint --non-persistent-save-interval 5 --load-main-params-from-ckpt
--ckpt-convert-format torch --perform-rl-step --retro-project-dir r --encoder-num-layers 2
--heterogeneous-layers-config-path h --use-torch-fsdp2 --recompute-modules mlp --offload-modules mlp
"""


def test_flags_that_would_change_the_run_are_refused():
    with pytest.raises(ValueError) as caught:
        parse(REFUSED, [])
    problems = re.split(r"; (?=unknown flag |--)", str(caught.value))
    flags = [word for word in REFUSED.split() if word.startswith("--")]
    for flag, problem in zip(flags, problems, strict=True):
        assert re.match(rf"(unknown flag )?{flag}\b", problem)
        assert "no effect" not in problem


def test_default_position_embedding_matches_megatron():
    words = [*base_config.ARGUMENTS.removesuffix(" --position-embedding-type rope").split()]
    run = read_run([*words, "--use-mcore-models", "--max-position-embeddings", "32"], Launch())
    model = gpt_config(run.config, 61)
    assert (model.rope, model.max_position_embeddings) == (None, 32)
    rotary = read_run([*words, "--use-rotary-position-embeddings"], Launch())
    assert gpt_config(rotary.config, 61).max_position_embeddings is None


FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("--checkpoint-activations", {**FULL, "recompute_num_layers": 1}),
        ("--checkpoint-activations --checkpoint-num-layers 2", {**FULL, "recompute_num_layers": 2}),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 1",
            {**FULL, "recompute_method": "block", "recompute_num_layers": 1},
        ),
        ("--moe-layer-recompute", {"recompute_granularity": "selective"}),
        (
            "--moe-layer-recompute --checkpoint-activations",
            {**FULL, "recompute_num_layers": 1},
        ),
        ("--use-multi-token-prediction --num-mtp-predictor 2", {"mtp_num_layers": 2}),
        ("--do-layernorm-bias-weight-decay", {"weight_decay_group": ("*=1",)}),
        ("--wandb-name n --wandb-project p", {"wandb_exp_name": "n"}),
        ("--use-gated-attention --attention-output-gate", {"attention_output_gate": True}),
        ("--linear-cp-mode chunkwise", {"linear_cp_mode": "segments"}),
    ],
)
def test_flags_of_forks_and_old_versions_are_translated(text, options):
    config = parse(text, [])
    values = {name: v for section in vars(config).values() for name, v in vars(section).items()}
    assert {name: values[name] for name in options} == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--checkpoint-num-layers 2", "--recompute-num-layers 2"),
        (
            "--checkpoint-activations --recompute-granularity selective",
            "contradicts --recompute-granularity selective",
        ),
        ("--use-multi-token-prediction", "--mtp-num-layers"),
        ("--num-mtp-predictor 2", "--mtp-num-layers 2"),
        ("--do-layernorm-bias-weight-decay --weight-decay-group *.bias=1", "contradict"),
    ],
)
def test_contradicting_translated_flags_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(text, [])


EXPERTS = "--num-experts 4 --disable-bias-linear"


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("--sequence-parallel", ""),
        ("--save-interval 5", ""),
        ("--no-save-optim", ""),
        ("--eval-iters -1", "--eval-iters 0"),
        ("--num-query-groups 2", ""),
        ("--moe-router-load-balancing-type seq_aux_loss", EXPERTS),
        ("--ffn-hidden-size 64", f"{EXPERTS} --moe-ffn-hidden-size 32"),
    ],
)
def test_options_without_effect_are_listed_and_change_nothing(text, base, capsys):
    words = last_wins([*ARGUMENTS.split(), *base.split()])
    plain = read_run(words, Launch()).config
    assert text not in capsys.readouterr().err
    run = read_run(last_wins([*words, *text.split()]), Launch())
    assert f"no effect here: {text} (" in capsys.readouterr().err
    models = (gpt_config(config, 61) for config in (run.config, plain))
    weights, plain_weights = (logical_weights(model) for model in models)
    assert weights == plain_weights
    assert run.config.parallel == plain.parallel
    assert run.config.evaluation == plain.evaluation
    with pytest.raises(ValueError, match=f"--strict-flags.*{text.split()[0]}"):
        read_run([*last_wins([*words, *text.split()]), "--strict-flags"], Launch())


def test_ckpt_format_and_nan_check_flags_are_explained():
    notes: list[str] = []
    parse("--ckpt-format torch --no-check-for-nan-in-loss-and-grad", notes)
    lines = {line.split(": ")[0]: line for line in notes}
    assert "safetensors" in lines["--ckpt-format torch"]
    assert "--max-consecutive-bad-steps" in lines["--no-check-for-nan-in-loss-and-grad"]


@pytest.mark.skipif(transformer_engine_problem() is None, reason="TransformerEngine is here")
def test_absent_library_fails_a_run_but_not_print_config(capsys):
    words = [*ARGUMENTS.split(), "--transformer-impl", "transformer_engine"]
    with pytest.raises(ValueError, match="--transformer-impl transformer_engine"):
        read_run(words, Launch())
    with pytest.raises(HelpRequested) as caught:
        read_run([*words, "--print-config"], Launch())
    assert 'transformer-impl: "transformer_engine"' in caught.value.text
    assert "--transformer-impl transformer_engine" in capsys.readouterr().err


#: Unknown flags and the flag to suggest, whose spelling is not similar; None for no suggestion.
ADVICE = {
    "qk-rope-heads": None, "num-shared-experts": "moe-shared-expert-intermediate-size",
    "moe-loss-weight": "moe-aux-loss-coeff", "deepspeed": "data-parallel-sharding-strategy",
    "fake-process-group": "print-config", "use-legacy-models": None, "embed-layernorm": None,
    "kv-head-dim": None, "qk-lora-rank": None, "scaling-factor": None, "rope-head-dim": None,
    "layernorm": None, "attention-gate": None, "moe-topk": None, "glu": None,
}  # fmt: skip


def test_advice_names_the_equivalent_flag_or_none():
    with pytest.raises(ValueError) as caught:
        parse(" ".join(f"--{name} 1" for name in ADVICE), [])
    advice = "(?:: (?:use|did you mean) --([a-z0-9-]+))?"
    problems = re.split(r"; (?=unknown flag |--)", str(caught.value))
    matches = [re.match(rf"(?:unknown flag )?--([a-z-]+){advice}", text) for text in problems]
    assert {match[1]: match[2] for match in matches} == ADVICE


def test_suggestions_are_only_for_misspellings():
    names = [
        field.name.replace("_", "-") for s in vars(small_config()).values() for field in fields(s)
    ]
    assert len(names) > 150
    for name in names:
        words = name.split("-")
        longest = max(range(len(words)), key=lambda i: len(words[i]))
        typo = "-".join([*words[:longest], words[longest][:-1], *words[longest + 1 :]])
        suggested = suggest(typo, names)
        if len(words[longest]) > 4:
            assert re.search(rf"[ ]{name}( or |\?)", suggested) or typo in names, (typo, suggested)
        # A name that lacks a whole word is another option, not a misspelling.
        for i in range(len(words)):
            shorter = "-".join([*words[:i], *words[i + 1 :]])
            assert not suggest(shorter, [name]), (shorter, name)
