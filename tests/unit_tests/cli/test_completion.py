# SPDX-License-Identifier: Apache-2.0
"""Shell completion: what bash offers after a module's name."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Literal

from megatron.cli.flags import completion_script
from megatron.cli.schema import options
from megatron.training.config import Config

MODULE = "megatron.training.pretrain_gpt"


def script(shell: str = "bash") -> str:
    return completion_script(options(Config), f"python -m {MODULE}", shell)


def completions(text: str, *words: str) -> list[str]:
    """Return bash's completions of the last word."""
    call = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _megatron_complete; echo "${COMPREPLY[@]}"'
    completed = subprocess.run(
        ["bash", "--norc", "-c", f"{text}\n{call}", "bash", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert completed.stderr == ""
    return completed.stdout.split()


def test_bash_completes_flags_and_choices():
    start = ("torchrun", "--nproc-per-node", "2", "-m", MODULE)
    assert completions(script(), *start, "--hidden-s") == ["--hidden-size"]
    assert completions(script(), *start, "--bf16", "--no-bf") == ["--no-bf16"]
    assert completions(script(), *start, "--optimizer", "") == ["adam", "sgd", "muon"]
    assert completions(script(), *start, "--optimizer", "s") == ["sgd"]
    assert completions(script(), *start, "--save", "") == [], "the shell offers files"
    assert len(completions(script(), *start, "")) > len(options(Config))
    assert completions(script(), "python", "--hidden-s") == []
    assert completions(script(), "python", "-m", "megatron.other", "--hidden-s") == []


@dataclass(frozen=True, kw_only=True)
class OtherConfig:
    """Another program."""

    number: Literal["one", "two"] = "one"
    """A number."""


def test_scripts_of_two_programs_share_one_shell():
    scripts = script() + completion_script(options(OtherConfig), "python -m megatron.other", "bash")
    assert completions(scripts, "python", "-m", "megatron.other", "--number", "") == ["one", "two"]
    assert completions(scripts, "python", "-m", MODULE, "--hidden-s") == ["--hidden-size"]


def test_commands_of_a_module_complete_their_own_flags():
    text = completion_script(options(OtherConfig), "python -m megatron.other first", "bash")
    text += completion_script(options(Config), "python -m megatron.other second", "bash")
    start = ("python", "-m", "megatron.other")
    assert completions(text, *start, "first", "--number", "t") == ["two"]
    assert completions(text, *start, "second", "--hidden-s") == ["--hidden-size"]
    assert completions(text, *start, "--hidden-s") == []


def test_zsh_loads_the_bash_script_through_bashcompinit():
    head, _, bash_body = script("bash").partition("\n")
    lines = script("zsh").splitlines()
    assert lines[1:3] == [
        "autoload -U +X compinit && compinit",
        "autoload -U +X bashcompinit && bashcompinit",
    ]
    assert "\n".join(lines[3:]) + "\n" == bash_body
    assert "bash" in head
