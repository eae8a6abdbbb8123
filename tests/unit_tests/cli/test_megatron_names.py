# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron's scripts: an option, a flag without effect, or an error with a reason."""

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
from megatron.training.config.megatron_flags import NO_EFFECT, TRANSLATED
from tests.support.arguments import last_wins
from tests.unit_tests.training.small_config import ARGUMENTS, small_config

#: Flags of scripts and test configurations for Megatron, most used first.
MEGATRON_FLAGS = """
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

#: Values in Megatron's scripts of options with many values or choices.
VALUES = """
--tokenizer-type HuggingFaceTokenizer --transformer-impl local --lr-decay-style cosine
--normalization RMSNorm --position-embedding-type rope --dataloader-type single
--attention-backend auto --optimizer adam --data-parallel-sharding-strategy optim
"""

OPTIONS = {option.name: option for option in options(Config)}
WITHOUT_EFFECT = {flag.name: flag.option for flag in NO_EFFECT}


def flag_arguments(option: Option, name: str) -> list[str]:
    """Return arguments that set an option."""
    if option.kind is bool:
        return [f"--{name}"]
    arguments = VALUES.split()
    if f"--{name}" in arguments:
        return [f"--{name}", arguments[arguments.index(f"--{name}") + 1]]
    text = option.choices[0] if option.choices else {int: "2", float: "0.5", str: "a"}[option.kind]
    return [f"--{name}", text]


def read(text: str) -> dict:
    """Return the values of arguments, read as a training program reads them."""
    return read_flags(text.split(), list(OPTIONS.values()), harmless=list(WITHOUT_EFFECT.values()))


@pytest.mark.parametrize("name", MEGATRON_FLAGS.split())
def test_each_used_megatron_flag_works_or_gets_advice(name):
    option = OPTIONS.get(name) or OPTIONS.get(name.removeprefix("no-"))
    if option is not None and (name in OPTIONS or option.kind is bool):
        assert option.name in read_flags(flag_arguments(option, name), list(OPTIONS.values()))
        return
    if name in WITHOUT_EFFECT:
        assert name in read(" ".join(flag_arguments(WITHOUT_EFFECT[name], name)))
        return
    with pytest.raises(ValueError, match=f"^--{name}( 2)?: ") as caught:
        read_flags([f"--{name}", "2"], list(OPTIONS.values()))
    text = str(caught.value)
    assert "\n" not in text
    advice, reason = text.split(": ", 2)[1:]
    assert advice in ("leave it out", "not supported") or advice.removeprefix("use --") in OPTIONS
    assert len(reason.split()) >= 3


def test_all_problems_of_a_script_are_one_line():
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
        for megatron, local in values.items():
            assert local in OPTIONS[name].choices
            assert megatron not in OPTIONS[name].choices
            config = parse_command_line(
                Config,
                last_wins([*ARGUMENTS.split(), f"--{name}", megatron]),
                prog="p",
                description="d",
            ).config
            assert vars(vars(config)[str(OPTIONS[name].section)])[OPTIONS[name].field] == local
    assert our_value("tokenizer-type", "hf") == "hf"
    with pytest.raises(ValueError, match=r"tokenizer.json"):
        small_config("--tokenizer-type BertWordPieceCase")


@pytest.mark.parametrize("text", ["127,0", "(127, 0)", "128"])
def test_window_counts_the_current_token(text):
    assert small_config(f"--window-size {text.replace(' ', '')}").attention.window_size == 128


@pytest.mark.parametrize("text", ["127,1", "-1,0", "127,-1"])
def test_window_that_looks_ahead_is_refused(text):
    with pytest.raises(ValueError, match="window-size"):
        small_config(f"--window-size {text}")


def test_flag_tables_shadow_no_option_and_suggest_real_options():
    switches = [f"no-{o.name}" for o in OPTIONS.values() if o.kind is bool]
    translated = [option.name for option in TRANSLATED]
    listed = [*OPTIONS, *WITHOUT_EFFECT, *ALIASES, *translated, *switches]
    names = set(listed)
    assert len(names) == len(listed), "a name has several meanings"
    assert not names & set(answered()), "a supported option has advice"
    assert not [(n, p) for n in names for p in answered_prefixes() if n.startswith(p)]
    for name, advice in answered().items():
        nearest = {None, *OPTIONS, "config", "print-config"}
        assert advice.nearest in nearest, name
        assert advice.reason
        assert not {"\n", ";"} & set(advice.reason), name


def test_unknown_flag_may_be_near_a_flag_with_advice():
    assert answer("inference-whatever") is not None
    assert answer("whatever") is None
    with pytest.raises(ValueError, match="--attention-softmax-in-fp32"):
        read("--attention-softmax-fp32")
    with pytest.raises(ValueError) as caught:
        read("--attention-softmax-fp32 --strict-flags")
    assert "--attention-softmax-in-fp32" not in str(caught.value)


@pytest.mark.parametrize("name", ALIASES)
def test_alias_of_an_option_sets_it(name):
    option, text = ALIASES[name]
    alias_arguments = f"--{name}" if text else " ".join(flag_arguments(OPTIONS[option], name))
    value = text or " ".join(flag_arguments(OPTIONS[option], option)[1:])
    expected = {"true": f"--{option}", "false": f"--no-{option}"}.get(text, f"--{option} {value}")
    assert read(alias_arguments) == read(expected)


def test_alias_with_a_value_or_a_contradiction_is_refused():
    with pytest.raises(ValueError, match="--recompute-activations"):
        read("--recompute-activations full")
    for arguments in (
        "--use-rotary-position-embeddings --position-embedding-type none",
        "--position-embedding-type none --use-rotary-position-embeddings",
    ):
        with pytest.raises(ValueError, match="contradict: keep one"):
            read(arguments)


@pytest.mark.parametrize(
    ("name", "local"),
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
def test_flags_of_other_programs_suggest_the_local_name(name, local):
    with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')}: use --{local}: "):
        read(f"--{name} 3")


def test_refused_flag_is_never_suggested():
    # Misspell every flag with advice: the misspelling is nearest to the flag itself.
    for name in answered():
        with pytest.raises(ValueError) as caught:
            read(f"--{name}x 1")
        suggested = str(caught.value).partition("did you mean --")[2].rstrip("?")
        if suggested:
            accepted = {*OPTIONS, *WITHOUT_EFFECT, *(f"no-{n}" for n in OPTIONS)}
            assert suggested in accepted, str(caught.value)


def test_advice_never_names_an_option_the_program_lacks():
    with pytest.raises(ValueError, match=r"^unknown flag --learning-rate$"):
        read_flags(["--learning-rate", "1"], [OPTIONS["seed"]])
