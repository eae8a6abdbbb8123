# SPDX-License-Identifier: Apache-2.0
"""YAML files of options: types, file:line in every error, and a round trip of written options."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.cli.schema import Option, build, flatten, options
from megatron.cli.yaml_file import read_options, write_options
from megatron.training.config import Config
from tests.unit_tests.training.small_config import small_config

OPTIONS = options(Config)


def read(tmp_path, text: str):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return read_options(file, OPTIONS)


def test_values_have_the_types_of_the_schema(tmp_path):
    values = read(
        tmp_path,
        "# a comment\nlr: 1e-4\nmin_lr: 1.5E-05\nnum-layers: 4\nbf16: true\nsave: 123\n"
        "ffn-hidden-size: null\ndata-path: [1, a, 2.5, b]\nload: ~\nloss-scale: 4096\n",
    )
    assert values == {
        "lr": 1e-4,
        "min-lr": 1.5e-5,
        "num-layers": 4,
        "bf16": True,
        "save": "123",
        "ffn-hidden-size": None,
        "data-path": ("1", "a", "2.5", "b"),
        "load": None,
        "loss-scale": 4096.0,
    }
    assert isinstance(values["loss-scale"], float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "num-layers: 2\nnum-layer: 3",
            r"run.yaml:2: unknown key 'num-layer': did you mean num-layers\?",
        ),
        ("lr: 1e-4\nseed: 1\nlr: 1e-3", r"run.yaml:3: lr is already set on line 1"),
        ("num-layers: 2\nnum_layers: 3", r"run.yaml:2: num-layers is already set on line 1"),
        ("seed: 1\nlr: fast", r"run.yaml:2: lr is 'fast': expected a number"),
        ("bf16: yes", r"run.yaml:1: bf16 is 'yes': use true or false"),
        ("lr: [1, 2]", r"run.yaml:1: lr takes one value, not a list"),
        ("data-path: []", r"run.yaml:1: data-path needs at least one value"),
        ("data-path: [[a]]", r"run.yaml:1: data-path must be a plain value"),
        ("lr:\n", r"run.yaml:1: lr has no value"),
        ("model:\n  lr: 1", r"run.yaml:1: unknown key 'model'"),
        ("- lr", r"run.yaml:1: expected `option: value` lines"),
        ("seed: 1\nlr: {", r"run.yaml:\d: not valid YAML"),
        ("save: !!python/object/apply:os.system [id]", r"run.yaml:1: save takes one value"),
        ("data-path: !!python/object/apply:os.system [id]", r"run.yaml:1: data-path: the tag"),
        ("save: !!python/name:os.system ''", r"run.yaml:1: save: the tag .* is not allowed"),
        ("save: !x y", r"run.yaml:1: save: the tag !x is not allowed"),
    ],
)
def test_errors_name_file_and_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_yaml_tags_cannot_run_code(tmp_path):
    canary = tmp_path / "canary"
    text = f"data-path: !!python/object/apply:os.system ['touch {canary}']"
    with pytest.raises(ValueError):
        read(tmp_path, text)
    assert not canary.exists()


BOMB = "\n".join(["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "run.yaml:1: anchors"),
        ("<<: &a {seed: 1}\n", "run.yaml:1: anchors"),
        ("data-path: " + "[" * 100_000, "run.yaml:1: .*nested"),
        ("? " * 100_000, "run.yaml:1: .*nested"),
        ("data-path: [" + "a, " * 1_000_000 + "a]", "262144 bytes"),
        ("--- a\n--- b\n", "run.yaml:2"),
        ("seed: \0", "run.yaml"),
    ],
    ids=["bomb", "merge", "lists", "mappings", "long", "documents", "nul"],
)
def test_malicious_yaml_is_refused_quickly(tmp_path, text, words):
    start = time.process_time()
    with pytest.raises(ValueError, match=words) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 2.0


def test_variable_is_expanded_and_plain_text_is_unchanged(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text('save: ${ROOT}/a\nload: "$${ROOT}/${STEP}"\nseed: ${STEP}\ndata-path: ["${A}"]')
    values = read_options(file, OPTIONS, environment={"ROOT": "/runs", "STEP": "7", "A": "none"})
    assert values == {
        "save": "/runs/a",
        "load": "${ROOT}/7",
        "seed": 7,
        "data-path": ("none",),
    }
    config = small_config("--save ${ROOT}/$${X}/$x --load ${")
    written = write_options(flatten(config), OPTIONS)
    assert build(Config, read(tmp_path, written)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nsave: ${ABSENT}/x", r"run.yaml:2: save: the environment variable ABSENT is not"),
        ("save: ${WANDB_API_KEY}", r"run.yaml:1: save: \$\{WANDB_API_KEY\} looks like a secret"),
        ("seed: ${WORD}", r"run.yaml:1: seed is 'word': expected an integer"),
        ("save: https://me:${WORD}@host", r"run.yaml:1: save contains a user and a password"),
    ],
)
def test_absent_secret_or_invalid_variables_are_refused(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    environment = {"WANDB_API_KEY": "hush", "WORD": "word"}
    with pytest.raises(ValueError, match=message) as caught:
        read_options(tmp_path / "run.yaml", OPTIONS, environment=environment)
    assert "hush" not in str(caught.value)


def test_unsupported_megatron_keys_are_named_with_their_line(tmp_path):
    with pytest.raises(ValueError, match=r"run.yaml:2: load-main-params-from-ckpt: .* saf"):
        read(tmp_path, "seed: 3\nload_main_params_from_ckpt: true")


def test_aliases_of_an_option_are_keys_too(tmp_path):
    text = "hybrid_override_pattern: MM*-\nrecompute-activations: true"
    values = {"hybrid-layer-pattern": "MM*-", "recompute-granularity": "selective"}
    assert read(tmp_path, text) == values
    with pytest.raises(ValueError, match=r"run.yaml:1: recompute-activations must be true"):
        read(tmp_path, "recompute-activations: false")
    with pytest.raises(ValueError, match=r"run.yaml:2: .* already set on line 1"):
        read(tmp_path, "hybrid-layer-pattern: MM\nhybrid-override-pattern: MM")


def test_unreadable_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_options(tmp_path / "absent.yaml", OPTIONS)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        read_options(tmp_path / "bytes.yaml", OPTIONS)


def test_empty_file_sets_nothing(tmp_path):
    assert read(tmp_path, "# nothing\n") == {}


def test_written_options_read_back_unchanged(tmp_path):
    config = small_config("--bf16 --save none --data-path 1 a:b 2 #c --split 1 --lr 1e-05")
    text = write_options(flatten(config), OPTIONS, notes={"world size": "4"})
    reread = build(Config, read(tmp_path, text))
    assert reread == config
    assert write_options(flatten(reread), OPTIONS, notes={"world size": "4"}) == text


_OPTION = Option(name="save", section=None, field="save", kind=str, optional=True)
_LIST = Option(name="data-path", section=None, field="data_path", kind=str, many=True)


@settings(max_examples=60, deadline=None)
@given(
    text=st.none() | st.text(st.characters(blacklist_categories=["Cs"])),
    many=st.lists(st.text(st.characters(blacklist_categories=["Cs"])), min_size=1),
)
def test_any_text_survives_a_round_trip(text, many, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / f"any-{os.getpid()}.yaml"
    values = {"save": text, "data-path": tuple(many)}
    file.write_text(write_options(values, [_OPTION, _LIST]), encoding="utf-8", newline="")
    assert read_options(file, [_OPTION, _LIST]) == values
