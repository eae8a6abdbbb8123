# SPDX-License-Identifier: Apache-2.0
"""Every option of a run has an observable effect, listed in `option_effects`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.cli.flags import negative
from megatron.cli.launch import Launch
from megatron.cli.schema import Option, options
from megatron.cli.tokenizers import train_bpe
from megatron.training.config import Config
from megatron.training.pretrain_gpt import read_run
from tests.functional_tests.observers import RunObservation, listeners, observe_run, plan
from tests.functional_tests.option_effects import EFFECTS, Effect
from tests.functional_tests.small_run import flags, run_in_process, write_tokens
from tests.support.arguments import last_wins
from tests.support.llama_tokenizer import write_llama_tokenizer
from tests.support.tiktoken_files import write_ranks

OPTIONS = {option.name: option for option in options(Config)}
SHORT = "--eval-interval 0 --train-iters 2 --lr-warmup-iters 0"
#: Observers that need a run of two steps.
RUNS = ("constructors", "loss", "log", "file")


def test_table_lists_exactly_the_options():
    missing = set(OPTIONS) - set(EFFECTS)
    assert not missing, f"add the effects of these options to option_effects.py: {sorted(missing)}"
    assert not set(EFFECTS) - set(OPTIONS)


def write_hugging_face(folder: Path) -> Path:
    """Write a Hugging Face folder with the config of the small run's model."""
    folder.mkdir()
    shape = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**kind, **shape, **heads}))
    save_file({"lm_head.weight": torch.zeros(61, 48)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def option_paths(tmp_path_factory) -> dict[str, str]:
    """Write the files that options refer to and return their paths by the names in the table."""
    root = tmp_path_factory.mktemp("options")
    paths = {}
    for name, seed in (("data", 5), ("data2", 6)):
        prefix = write_tokens(root / name, seed=seed)
        described = {"tokenizer": {"vocab_size": 61, "eod": 3}}
        prefix.with_suffix(".json").write_text(json.dumps(described))
        paths[name] = str(prefix)
    chats = write_tokens(root / "chats").with_suffix(".json")
    chats.write_text(json.dumps({"kind": "chat", "tokenizer": {"vocab_size": 61, "eod": 3}}))
    paths["chats"] = str(root / "chats")
    for end in ("", "2"):
        data_prefix = paths[f"data{end}"]
        (root / f"args{end}").write_text(data_prefix)
        paths[f"args{end}"] = str(root / f"args{end}")
        splits = {"train": [data_prefix], "valid": [data_prefix], "test": None}
        (root / f"splits{end}").write_text(json.dumps(splits))
        paths[f"splits{end}"] = str(root / f"splits{end}")
        words = ["the theory of the thing", f"a def is a def{end} of a thing{end}"]
        model = root / f"tokenizer{end}.json"
        train_bpe(words * 20, 300, model)
        paths[f"tokenizer{end}"] = str(model)
    write_llama_tokenizer(root / "bos")
    paths["bos"] = str(root / "bos")
    paths["ranks"] = str(write_ranks(root / "ranks.tiktoken"))
    paths["hf"] = str(write_hugging_face(root / "hf"))
    assert run_in_process(flags(Path(paths["data"]), f"{SHORT} --save {root / 'saved'}")) == 0
    shutil.copytree(root / "saved", root / "damaged")
    (root / "damaged" / "iter_0000009").mkdir()
    return {**paths, "saved": str(root / "saved"), "damaged": str(root / "damaged")}


def arguments(
    option: Option, effect: Effect, changed: bool, option_paths: dict[str, str]
) -> list[str]:
    """Return the command line with one of the option's two values."""
    if option.kind is bool:
        words = [f"--{option.name}" if changed else f"--{negative(option.name)}"]
    else:
        value = effect.changed if changed else effect.baseline
        words = [f"--{option.name}", *value.split()] if value else []
    dropped = ["--metrics-file", *effect.without.split()]
    dropped += effect.replaces.split() if changed else []
    start = flags(Path(option_paths["data"]), SHORT if effect.observer in RUNS else "")
    remaining = [w for i, w in enumerate(start) if w not in dropped and start[i - 1] not in dropped]
    text = " ".join([*effect.base.split(), *words])
    for name, option_path in option_paths.items():
        text = text.replace(f"{{{name}}}", option_path)
    return last_wins([*remaining, *text.split()])


@pytest.fixture(scope="module")
def observe_cached(tmp_path_factory) -> Callable[[list[str]], RunObservation]:
    """Return `observe_run` with a cache by arguments."""
    observations: dict[tuple[str, ...], RunObservation] = {}

    def look(argv: list[str]) -> RunObservation:
        if tuple(argv) not in observations:
            observations[tuple(argv)] = observe_run(argv, tmp_path_factory.mktemp("run"))
        return observations[tuple(argv)]

    return look


def option_problem(argv: list[str], world: int) -> str:
    """Return the error message about options, or "fine"."""
    try:
        read_run(argv, Launch(world_size=world))
    except ValueError as error:
        return str(error)
    return "fine"


def observe(
    name: str,
    changed: bool,
    option_paths: dict[str, str],
    observe_cached: Callable[..., RunObservation],
) -> Any:
    """Return the observation that the table names, for one of an option's two values."""
    effect = EFFECTS[name]
    argv = arguments(OPTIONS[name], effect, changed, option_paths)
    if effect.observer == "plan":
        return plan(argv, effect.world)
    if effect.observer == "listeners":
        return listeners(argv, effect.world)
    if effect.observer == "refusal":
        return option_problem(argv, effect.world)
    observation = observe_cached(argv)
    return {
        "constructors": observation.constructors,
        "loss": observation.losses,
        "log": (observation.code, observation.lines),
        "file": observation.files,
    }[effect.observer]


@pytest.mark.parametrize("name", EFFECTS)
def test_option_values_differ_in_the_named_observer(name, option_paths, observe_cached):
    baseline, changed_observation = (
        observe(name, changed, option_paths, observe_cached) for changed in (False, True)
    )
    assert baseline, "there is nothing to compare"
    assert baseline != changed_observation


@pytest.mark.parametrize("name", ["lr", "seed", "eval-iters", "save", "manual-gc-interval"])
def test_observations_are_reproducible(name, option_paths, tmp_path_factory):
    observation, repeated = (
        observe(
            name,
            True,
            option_paths,
            lambda argv: observe_run(argv, tmp_path_factory.mktemp("again")),
        )
        for _ in range(2)
    )
    assert observation == repeated
