# SPDX-License-Identifier: Apache-2.0
"""Every option of a run changes something that can be seen: the table of effects has them all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.cli.launch import Launch
from megatron.cli.schema import Option, options
from megatron.cli.tokenizers import train_bpe
from megatron.training.config import Config
from megatron.training.pretrain_gpt import read_run
from tests.functional_tests.observers import Seen, listeners, plan, see
from tests.functional_tests.option_effects import EFFECTS, Effect
from tests.functional_tests.small_run import flags, run_here, write_tokens
from tests.support.arguments import last_wins
from tests.support.llama_tokenizer import write_llama_tokenizer
from tests.support.tiktoken_files import write_ranks

OPTIONS = {option.name: option for option in options(Config)}
SHORT = "--eval-interval 0 --train-iters 2 --lr-warmup-iters 0"
#: An option of this kind is compared in a run of two steps.
RUNS = ("parts", "loss", "log", "file")


def test_the_table_has_every_option_and_no_other():
    missing = set(OPTIONS) - set(EFFECTS)
    assert not missing, f"say in option_effects.py what these change: {sorted(missing)}"
    assert not set(EFFECTS) - set(OPTIONS)


def write_hugging_face(folder: Path) -> Path:
    """Write what says which model a Hugging Face folder holds; that of the small run."""
    folder.mkdir()
    shape = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**kind, **shape, **heads}))
    save_file({"lm_head.weight": torch.zeros(61, 48)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Write the files that options name, and return where they are by the names of the table."""
    root = tmp_path_factory.mktemp("options")
    found = {}
    for name, seed in (("data", 5), ("data2", 6)):
        prefix = write_tokens(root / name, seed=seed)
        described = {"tokenizer": {"vocab_size": 61, "eod": 3}}
        prefix.with_suffix(".json").write_text(json.dumps(described))
        found[name] = str(prefix)
    chats = write_tokens(root / "chats").with_suffix(".json")
    chats.write_text(json.dumps({"kind": "chat", "tokenizer": {"vocab_size": 61, "eod": 3}}))
    found["chats"] = str(root / "chats")
    for end in ("", "2"):
        data = found[f"data{end}"]
        (root / f"args{end}").write_text(data)
        found[f"args{end}"] = str(root / f"args{end}")
        splits = {"train": [data], "valid": [data], "test": None}
        (root / f"splits{end}").write_text(json.dumps(splits))
        found[f"splits{end}"] = str(root / f"splits{end}")
        words = ["the theory of the thing", f"a def is a def{end} of a thing{end}"]
        model = root / f"tokenizer{end}.json"
        train_bpe(words * 20, 300, model)
        found[f"tokenizer{end}"] = str(model)
    write_llama_tokenizer(root / "bos")
    found["bos"] = str(root / "bos")
    found["ranks"] = str(write_ranks(root / "ranks.tiktoken"))
    found["hf"] = str(write_hugging_face(root / "hf"))
    assert run_here(flags(Path(found["data"]), f"{SHORT} --save {root / 'saved'}")) == 0
    shutil.copytree(root / "saved", root / "damaged")
    (root / "damaged" / "iter_0000009").mkdir()
    return {**found, "saved": str(root / "saved"), "damaged": str(root / "damaged")}


def arguments(option: Option, effect: Effect, other: bool, places: dict[str, str]) -> list[str]:
    """Return the command line with one of the option's two values."""
    if option.kind is bool:
        words = [f"--{option.name}" if other else f"--no-{option.name}"]
    else:
        value = effect.other if other else effect.one
        words = [f"--{option.name}", *value.split()] if value else []
    dropped = ["--metrics-file", *effect.without.split()]
    dropped += effect.replaces.split() if other else []
    start = flags(Path(places["data"]), SHORT if effect.observer in RUNS else "")
    kept = [w for i, w in enumerate(start) if w not in dropped and start[i - 1] not in dropped]
    more = " ".join([*effect.base.split(), *words])
    for name, place in places.items():
        more = more.replace(f"{{{name}}}", place)
    return last_wins([*kept, *more.split()])


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Callable[[list[str]], Seen]:
    """Return `see` that runs the same arguments once."""
    known: dict[tuple[str, ...], Seen] = {}

    def look(argv: list[str]) -> Seen:
        if tuple(argv) not in known:
            known[tuple(argv)] = see(argv, tmp_path_factory.mktemp("run"))
        return known[tuple(argv)]

    return look


def option_problem(argv: list[str], world: int) -> str:
    """Return what is wrong with options, or that nothing is."""
    try:
        read_run(argv, Launch(world_size=world))
    except ValueError as error:
        return str(error)
    return "fine"


def observe(name: str, other: bool, places: dict[str, str], seen: Callable[..., Seen]) -> Any:
    """Return what the table says to compare, for one of an option's two values."""
    effect = EFFECTS[name]
    argv = arguments(OPTIONS[name], effect, other, places)
    if effect.observer == "plan":
        return plan(argv, effect.world)
    if effect.observer == "listeners":
        return listeners(argv, effect.world)
    if effect.observer == "refusal":
        return option_problem(argv, effect.world)
    found = seen(argv)
    return {
        "parts": found.parts,
        "loss": found.losses,
        "log": (found.code, found.lines),
        "file": found.files,
    }[effect.observer]


@pytest.mark.parametrize("name", EFFECTS)
def test_two_values_of_an_option_differ_where_the_table_says(name, places, seen):
    one, other = (observe(name, second, places, seen) for second in (False, True))
    assert one, "there is something to compare"
    assert one != other


@pytest.mark.parametrize("name", ["lr", "seed", "eval-iters", "save", "manual-gc-interval"])
def test_what_is_compared_is_the_same_twice(name, places, tmp_path_factory):
    first, again = (
        observe(name, True, places, lambda argv: see(argv, tmp_path_factory.mktemp("again")))
        for _ in range(2)
    )
    assert first == again
