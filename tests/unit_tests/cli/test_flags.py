# SPDX-License-Identifier: Apache-2.0
"""The command line: flags read as tyro reads them, precedence, one-line errors, and help without
torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import tyro

from megatron.cli.flags import HelpRequested, Invocation, help_text, parse_command_line, read_flags
from megatron.cli.schema import build, flatten, option_docs, options
from megatron.training.config import Config
from tests.support.arguments import last_wins
from tests.unit_tests.training.small_config import ARGUMENTS, small_config

#: Flags that a section requires in addition to the option that is the key.
NEEDS = {
    "save-interval": "--save folder", "async-save": "--save folder --save-interval 5",
    "on-failed-save": "--save folder --save-interval 5", "save-keep-last": "--save folder",
    "save-retain-interval": "--save folder", "load-fallback": "--load folder", "min-lr": "--lr 1.0",
    "rampup-batch-size": "--global-batch-size 14", "exp-avg-sq-dtype": "--adam-beta2 0.5",
    "manual-gc-interval": "--manual-gc", "use-checkpoint-args": "--load folder",
    "wandb-exp-name": "--wandb-project p", "wandb-entity": "--wandb-project p",
    "wandb-save-dir": "--wandb-project p", "mlflow-run-name": "--mlflow-experiment e",
    "mlflow-tracking-uri": "--mlflow-experiment e", "use-pytorch-profiler": "--profile",
    "memory-snapshot-path": "--record-memory-history", "mtp-num-layers": "--seq-length 8",
    "profile-step-end": "--profile-step-start 1", "experiment-option": "--experiment some_name",
}  # fmt: skip


def parse(text: str) -> Config:
    words = last_wins(text.split())
    return parse_command_line(Config, words, prog="p", description="d").config


def _other_value(option) -> list[str]:
    """Return arguments that set `option` to a value other than its default."""
    if option.kind is bool:
        return [f"--no-{option.name}" if option.default else f"--{option.name}"]
    if option.choices:
        choices = [c for c in option.choices if c != option.default] or list(option.choices)
        return [f"--{option.name}", choices[-1]]
    value = {int: "7", float: "0.125", str: "some/path"}[option.kind]
    if option.name.endswith("-factor"):
        value = "7.5"
    if option.name.endswith("-group"):
        value = "norm=0.5"
    value = {
        "experiment": "some_name",
        "experiment-option": "some_name.key=7",
        "gtp-opt-in-modules": "mla_down_proj",
        "step-batch-size-schedule": "0:7",
        "rampup-batch-size": "7 7 7",
    }.get(option.name, value)
    return [f"--{option.name}", *value.split()]


@pytest.mark.parametrize("option", options(Config), ids=lambda o: o.name)
def test_every_flag_is_read_as_tyro_reads_it(option):
    words = _other_value(option)
    actual = read_flags(words, options(Config))[option.name]
    section = {f.name: f for f in dataclasses.fields(Config)}[option.section]
    kind = next(type(vars(small_config())[section.name]) for f in [section])
    required = [
        w for o in options(kind) if o.required and o.name != option.name for w in _other_value(o)
    ]
    required += NEEDS.get(option.name, "").split()
    expected = tyro.cli(kind, args=[*required, *words])
    assert actual == vars(expected)[option.field]
    assert option.required or actual != option.default or len(option.choices) == 1


def test_every_flag_is_documented():
    docs = option_docs(Config)
    assert all(docs[option.name] for option in options(Config))


def test_switches_lists_and_equals_signs_are_parsed():
    config = parse(
        ARGUMENTS + " --bf16 --no-load-optim --lr=2e-4 --data-path 1 a 2 b --seq_length 40"
    )
    assert config.training.bf16
    assert not config.checkpoint.load_optim
    assert config.schedule.lr == 2e-4
    assert config.data.data_path == ("1", "a", "2", "b")
    assert config.training.seq_length == 40


@pytest.mark.parametrize(
    ("text", "values", "notes"),
    [
        (
            "--seed 1 --bf16 --seed=2",
            {"seed": 2, "bf16": True},
            ["--seed 2 overrides --seed 1, which precedes it"],
        ),
        (
            "--bf16 --no-bf16",
            {"bf16": False},
            ["--no-bf16 overrides --bf16, which precedes it"],
        ),
        (
            "--data-path a b --data_path a",
            {"data-path": ("a",)},
            ["--data-path a overrides --data-path a b, which precedes it"],
        ),
        ("--seed 1 --seed=1 --bf16 --bf16", {"seed": 1, "bf16": True}, []),
    ],
)
def test_last_of_two_flags_wins_with_a_note(text, values, notes):
    lines: list[str] = []
    assert read_flags(text.split(), options(Config), say=lines.append) == values
    assert lines == notes
    if notes:
        all_options = [*options(Config), *options(Invocation)]
        with pytest.raises(ValueError, match="contradict: keep one"):
            read_flags([*text.split(), "--strict_flags"], all_options, say=lines.append)


@pytest.mark.parametrize(
    "text",
    [
        "--tokenizer-model a --vocab-file b",
        "--vocab-file b --tokenizer-model a",
        "--hybrid-layer-pattern *- --hybrid-override-pattern *E",
        "--recompute-granularity full --recompute-activations",
    ],
)
def test_alias_that_contradicts_its_option_is_refused(text):
    """Megatron has both as separate flags, so the later flag does not override the earlier."""
    with pytest.raises(ValueError, match="contradict: keep one"):
        read_flags(text.split(), options(Config))


def test_repeated_alias_keeps_last_value_and_warns_once():
    warnings: list[str] = []
    words = ["--vocab-file", "a", "--vocab_file", "b"]
    values = read_flags(words, options(Config), say=warnings.append)
    assert values == {"tokenizer-model": "b"}
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layer 2", "unknown flag --num-layer: did you mean --num-layers?"),
        ("--tensor-parallel 2", "use --tensor-model-parallel-size: "),
        ("--hiden-size 2", "did you mean --hidden-size?"),
        ("--tensor-parallel-size 2", "use --tensor-model-parallel-size: "),
        ("--zzzz 2", "--zzzz$"),
        ("--num-layers two", "--num-layers.*'two'"),
        ("--num-layers 2.0", "expected an integer"),
        ("--num-layers", "--num-layers"),
        ("--num-layers 2 3", "unexpected argument '3'"),
        ("--lr nan", "--lr.*'nan'"),
        ("--bf16 true", "--bf16.*--bf16.*--no-bf16"),
        ("--normalization rms", "LayerNorm, RMSNorm"),
        ("--hidden-dropout 1.0", r"--hidden-dropout.*1.0.*\[0, 1\)"),
        ("--bf16 --seed=1 stray", "'stray'"),
    ],
)
def test_errors_are_one_line_with_the_fix(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(f"{ARGUMENTS} {words}")
    assert "\n" not in str(caught.value)


def test_missing_flags_are_all_named_at_once():
    with pytest.raises(ValueError, match=r"--num-layers, --hidden-size.*--lr"):
        parse("")


def test_errors_of_several_sections_are_listed_at_once():
    with pytest.raises(ValueError, match=r"--num-layers is 0.*; --micro-batch-size is -1"):
        parse(f"{ARGUMENTS} --num-layers 0 --micro-batch-size -1")


def test_config_file_sets_defaults_and_flags_win(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-4\nbf16: true\nseed: 5\nhidden-size: 64\n")
    config = parse(f"{ARGUMENTS} --config {file} --seed 6 --no-bf16")
    notes = capsys.readouterr().err.splitlines()
    assert f"p: --seed overrides seed in {file}" in notes
    assert config.training.seed == 6
    assert not config.training.bf16
    assert config.schedule.lr == 1e-3, "ARGUMENTS has --lr"
    only_file = small_config(f"--config {file}", without=("--lr", "--hidden-size"))
    assert only_file.schedule.lr == 1e-4
    assert only_file.model.hidden_size == 64


def test_help_lists_every_flag_with_and_without_tyro(monkeypatch):
    names = [o.name for o in [*options(Config), *options(Invocation)]]
    with_tyro = help_text(Config, about=Invocation, prog="p", description="d")
    monkeypatch.setitem(sys.modules, "tyro", None)
    without_tyro = help_text(Config, about=Invocation, prog="p", description="d")
    for text in (with_tyro, without_tyro):
        assert not [n for n in names if f"--{n}" not in text]


def test_help_and_completion_are_requests_not_errors():
    with pytest.raises(HelpRequested, match="--num-layers"):
        parse("--help --nonsense")
    with pytest.raises(HelpRequested, match="complete -o default"):
        parse("--print-completion bash")


def test_print_config_writes_yaml_that_reads_back(tmp_path):
    with pytest.raises(HelpRequested) as from_flags:
        parse(f"{ARGUMENTS} --seed 77 --print-config")
    (tmp_path / "run.yaml").write_text(from_flags.value.text)
    with pytest.raises(HelpRequested) as from_file:
        parse(f"--config {tmp_path / 'run.yaml'} --print-config")
    assert "seed: 77" in from_flags.value.text
    assert from_file.value.text == from_flags.value.text


def test_parsing_and_help_do_not_import_torch():
    code = (
        "import sys; from megatron.cli.flags import Invocation\n"
        "from megatron.training.config import Config\n"
        "from megatron.cli.flags import help_text\n"
        "help_text(Config, about=Invocation, prog='p', description='d')\n"
        "bad = {'torch', 'numpy', 'rich'} & set(sys.modules); sys.exit(f'imported {bad}' if "
        "bad else 0)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr


def test_flatten_and_build_are_inverse():
    config = small_config("--bf16 --save s --data-path 1 a 2 b")
    assert build(Config, flatten(config)) == config
