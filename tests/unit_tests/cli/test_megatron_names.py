# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron's scripts: each is an option, has no effect, or is answered with a reason."""

from __future__ import annotations

import pytest

from megatron.cli.flags import AcceptedFlags, parse_command_line, read_flags
from megatron.cli.megatron_names import (
    ALIASES,
    VALUE_NAMES,
    answer,
    answered,
    answered_prefixes,
    our_value,
)
from megatron.cli.schema import Option, options
from megatron.training.config import Config
from megatron.training.config.megatron_flags import NO_EFFECT
from megatron.training.config.translated_flags import TRANSLATED
from tests.support.arguments import last_wins
from tests.unit_tests.training.small_config import ARGUMENTS, small_config

#: What scripts and test configurations around Megatron give, most used first.
USED = """
micro-batch-size num-attention-heads hidden-size max-position-embeddings seq-length num-layers
tensor-model-parallel-size pipeline-model-parallel-size bf16 load save save-interval log-interval
ckpt-format lr min-lr tokenizer-type tokenizer-model global-batch-size clip-grad transformer-impl
weight-decay eval-interval eval-iters log-num-zeros-in-grad disable-bias-linear data-path
lr-decay-style tensorboard-dir split ffn-hidden-size position-embedding-type normalization
timing-log-level train-iters untie-embeddings-and-output-weights log-params-norm
attention-softmax-in-fp32 dist-ckpt-strictness data-cache-path deterministic-mode
group-query-attention num-query-groups vocab-extra-ids lr-decay-iters lr-warmup-fraction
attention-dropout hidden-dropout attention-backend swiglu no-gradient-accumulation-fusion
rotary-base rotary-percent sequence-parallel use-distributed-optimizer async-save
use-persistent-ckpt-worker kv-channels init-method-std num-experts make-vocab-size-divisible-by
expert-model-parallel-size adam-beta1 adam-beta2 moe-router-topk moe-router-load-balancing-type
use-checkpoint-args lr-warmup-samples no-load-optim moe-token-dispatcher-type
auto-detect-ckpt-format overlap-grad-reduce overlap-param-gather moe-aux-loss-coeff
distributed-timeout-minutes no-rope-fusion expert-tensor-parallel-size moe-router-dtype
moe-grouped-gemm tokenizer-metadata num-workers norm-epsilon moe-ffn-hidden-size
pretrained-checkpoint context-parallel-size moe-router-score-function exit-duration-in-mins
calculate-per-token-loss train-samples moe-shared-expert-intermediate-size hybrid-layer-pattern
ckpt-fully-parallel-save ckpt-fully-parallel-load finetune qk-layernorm
dist-ckpt-optim-fully-reshardable seed log-throughput cuda-graph-impl cross-entropy-loss-fusion
moe-router-enable-expert-bias dataloader-type manual-gc fp16 exit-interval
num-layers-per-virtual-pipeline-stage recompute-granularity wandb-project wandb-exp-name
moe-layer-freq mock-data no-check-for-nan-in-loss-and-grad
"""

#: Values that Megatron's scripts give to options of many values or choices.
VALUES = """
--tokenizer-type HuggingFaceTokenizer --transformer-impl local --lr-decay-style cosine
--normalization RMSNorm --position-embedding-type rope --dataloader-type single
--attention-backend auto --optimizer adam --data-parallel-sharding-strategy optim
"""

KNOWN = {option.name: option for option in options(Config)}
HARMLESS = {flag.name: flag.option for flag in NO_EFFECT}


def words(option: Option, name: str) -> list[str]:
    """Return words that give an option a value."""
    if option.kind is bool:
        return [f"--{name}"]
    given = VALUES.split()
    if f"--{name}" in given:
        return [f"--{name}", given[given.index(f"--{name}") + 1]]
    text = option.choices[0] if option.choices else {int: "2", float: "0.5", str: "a"}[option.kind]
    return [f"--{name}", text]


def read(text: str) -> dict:
    """Return the values that arguments give, as a program that trains reads them."""
    return read_flags(text.split(), list(KNOWN.values()), harmless=list(HARMLESS.values()))


@pytest.mark.parametrize("name", USED.split())
def test_each_flag_people_use_works_or_is_answered(name):
    option = KNOWN.get(name) or KNOWN.get(name.removeprefix("no-"))
    if option is not None and (name in KNOWN or option.kind is bool):
        assert option.name in read_flags(words(option, name), list(KNOWN.values()))
        return
    if name in HARMLESS:
        assert name in read(" ".join(words(HARMLESS[name], name)))
        return
    with pytest.raises(ValueError, match=f"^--{name}( 2)?: ") as caught:
        read_flags([f"--{name}", "2"], list(KNOWN.values()))
    text = str(caught.value)
    assert "\n" not in text
    advice, reason = text.split(": ", 2)[1:]
    assert advice in ("leave it out", "not supported") or advice.removeprefix("use --") in KNOWN
    assert len(reason.split()) >= 3


def test_a_whole_script_is_answered_in_one_line():
    script = (
        "--pipeline-model-parallel-size 1 --context-parallel-size=1 --transformer-impl "
        "inference_optimized --ckpt-format tar --attention-softmax-in-fp32 --vocab-extra-ids 1 "
        "--tokenizer-metadata m --moe-router-dtype fp64 --num-layer 2 --recompute-modules mlp"
    )
    with pytest.raises(ValueError) as caught:
        parse_command_line(
            Config,
            [*ARGUMENTS.split(), *script.split()],
            prog="p",
            description="d",
            accepted=AcceptedFlags(no_effect=NO_EFFECT),
        )
    problems = str(caught.value).split("; ")
    assert [p.partition(":")[0] for p in problems] == [
        "--transformer-impl is 'inference_optimized'",
        "--ckpt-format is 'tar'",
        "--vocab-extra-ids",
        "--tokenizer-metadata",
        "--moe-router-dtype is 'fp64'",
        "unknown flag --num-layer",
        "--recompute-modules",
    ]
    assert "use one of local, transformer_engine: it is for megatron.inference" in problems[0]
    assert "use --tokenizer-model: a tokenizer is one file" in problems[2]


def test_megatron_values_are_accepted_and_printed_by_local_name():
    for name, values in VALUE_NAMES.items():
        for theirs, ours in values.items():
            assert ours in KNOWN[name].choices
            assert theirs not in KNOWN[name].choices
            got = parse_command_line(
                Config,
                last_wins([*ARGUMENTS.split(), f"--{name}", theirs]),
                prog="p",
                description="d",
            ).config
            assert vars(vars(got)[str(KNOWN[name].section)])[KNOWN[name].field] == ours
    assert our_value("tokenizer-type", "hf") == "hf"
    with pytest.raises(ValueError, match=r"use one of .*: save it as a tokenizer.json and use hf"):
        small_config("--tokenizer-type BertWordPieceCase")


@pytest.mark.parametrize("text", ["127,0", "(127, 0)", "128"])
def test_a_window_of_tokens_before_counts_the_token_too(text):
    assert small_config(f"--window-size {text.replace(' ', '')}").attention.window_size == 128


@pytest.mark.parametrize("text", ["127,1", "-1,0", "127,-1"])
def test_a_window_that_looks_ahead_is_refused(text):
    with pytest.raises(ValueError, match="window-size"):
        small_config(f"--window-size {text}")


def test_flag_tables_shadow_no_option_and_suggest_real_options():
    switches = [f"no-{o.name}" for o in KNOWN.values() if o.kind is bool]
    translated = [option.name for option in TRANSLATED]
    listed = [*KNOWN, *HARMLESS, *ALIASES, *translated, *switches]
    names = set(listed)
    assert len(names) == len(listed), "a name stands for one thing"
    assert not names & set(answered()), "an option works and needs no answer"
    assert not [(n, p) for n in names for p in answered_prefixes() if n.startswith(p)]
    for name, known in answered().items():
        assert known.nearest is None or known.nearest in {*KNOWN, "config", "print-config"}, name
        assert known.reason
        assert not {"\n", ";"} & set(known.reason), name


#: Defaults of Megatron that decide what is computed, by flag.
DEFAULTS = {
    "adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8, "sgd-momentum": 0.9,
    "muon-momentum": 0.9, "muon-use-nesterov": False, "muon-num-ns-steps": 5,
    "muon-scale-mode": "spectral", "muon-extra-scale-factor": 1.0, "muon-split-qkv": True,
    "weight-decay": 0.01, "clip-grad": 1.0, "lr-decay-style": "linear", "seed": 1234,
    "init-method-std": 0.02, "norm-epsilon": 1e-5, "attention-dropout": 0.1,
    "hidden-dropout": 0.1, "rotary-base": 10000, "rotary-percent": 1.0, "moe-router-topk": 2,
    "moe-aux-loss-coeff": 0.0, "moe-router-bias-update-rate": 1e-3, "mtp-loss-scaling-factor": 0.1,
    "tokenizer-hf-no-include-special-tokens": False, "split": "969,30,1",
}  # fmt: skip


def test_defaults_that_change_results_are_megatrons():
    ours = {option.name: option.default for option in options(Config)}
    assert {name: ours[name] for name in DEFAULTS} == DEFAULTS


def test_an_unknown_flag_may_be_near_an_answered_one():
    assert answer("inference-whatever") is not None
    assert answer("whatever") is None
    with pytest.raises(ValueError, match="did you mean --attention-softmax-in-fp32"):
        read("--attention-softmax-fp32")
    with pytest.raises(ValueError) as caught:
        read("--attention-softmax-fp32 --strict-flags")
    assert "--attention-softmax-in-fp32" not in str(caught.value)


@pytest.mark.parametrize("name", ALIASES)
def test_another_name_of_an_option_sets_it(name):
    option, text = ALIASES[name]
    given = f"--{name}" if text else " ".join(words(KNOWN[option], name))
    value = text or " ".join(words(KNOWN[option], option)[1:])
    expected = {"true": f"--{option}", "false": f"--no-{option}"}.get(text, f"--{option} {value}")
    assert read(given) == read(expected)


def test_another_name_takes_no_other_value_and_contradicts_none():
    with pytest.raises(ValueError, match="--recompute-activations takes no value"):
        read("--recompute-activations full")
    for given in (
        "--use-rotary-position-embeddings --position-embedding-type none",
        "--position-embedding-type none --use-rotary-position-embeddings",
    ):
        with pytest.raises(ValueError, match="contradict: keep one"):
            read(given)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("learning-rate", "lr"),
        ("tp", "tensor-model-parallel-size"),
        ("epochs", "train-iters"),
        ("zero-stage", "data-parallel-sharding-strategy"),
        ("batch-size", "micro-batch-size"),
        ("max-grad-norm", "clip-grad"),
        ("output_dir", "save"),
    ],
)
def test_flags_of_other_programs_suggest_the_local_name(name, ours):
    with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')}: use --{ours}: "):
        read(f"--{name} 3")


def test_a_suggestion_is_never_a_flag_that_is_refused():
    # A misspelling of every flag with an answer, which is nearest to that flag itself.
    for name in answered():
        with pytest.raises(ValueError) as caught:
            read(f"--{name}x 1")
        suggested = str(caught.value).partition("did you mean --")[2].rstrip("?")
        if suggested:
            accepted = {*KNOWN, *HARMLESS, *(f"no-{n}" for n in KNOWN)}
            assert suggested in accepted, str(caught.value)


def test_an_answer_names_no_option_that_the_program_lacks():
    with pytest.raises(ValueError, match=r"^unknown flag --learning-rate$"):
        read_flags(["--learning-rate", "1"], [KNOWN["seed"]])
