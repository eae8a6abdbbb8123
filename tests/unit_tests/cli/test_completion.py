# SPDX-License-Identifier: Apache-2.0
"""Shell completion: what bash offers behind a module's name."""

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


def offered(text: str, *words: str) -> list[str]:
    """Return what bash completes the last of the words to."""
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _megatron_complete; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{text}\n{ask}", "bash", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_flags_choices_and_files():
    start = ("torchrun", "--nproc-per-node", "2", "-m", MODULE)
    assert offered(script(), *start, "--hidden-s") == ["--hidden-size"]
    assert offered(script(), *start, "--bf16", "--no-bf") == ["--no-bf16"]
    assert offered(script(), *start, "--optimizer", "") == ["adam", "sgd", "muon"]
    assert offered(script(), *start, "--optimizer", "s") == ["sgd"]
    assert offered(script(), *start, "--save", "") == [], "the shell offers files"
    assert len(offered(script(), *start, "")) > len(options(Config))
    assert offered(script(), "python", "--hidden-s") == []
    assert offered(script(), "python", "-m", "megatron.other", "--hidden-s") == []


@dataclass(frozen=True, kw_only=True)
class Other:
    """Another program."""

    number: Literal["one", "two"] = "one"
    """A number."""


def test_scripts_of_two_programs_live_in_one_shell():
    both = script() + completion_script(options(Other), "python -m megatron.other", "bash")
    assert offered(both, "python", "-m", "megatron.other", "--number", "") == ["one", "two"]
    assert offered(both, "python", "-m", MODULE, "--hidden-s") == ["--hidden-size"]


def test_a_module_may_have_commands():
    text = completion_script(options(Other), "python -m megatron.other first", "bash")
    text += completion_script(options(Config), "python -m megatron.other second", "bash")
    start = ("python", "-m", "megatron.other")
    assert offered(text, *start, "first", "--number", "t") == ["two"]
    assert offered(text, *start, "second", "--hidden-s") == ["--hidden-size"]
    assert offered(text, *start, "--hidden-s") == []


def test_zsh_is_taught_to_read_the_same_script():
    head, _, rest = script("bash").partition("\n")
    lines = script("zsh").splitlines()
    assert lines[1:3] == [
        "autoload -U +X compinit && compinit",
        "autoload -U +X bashcompinit && bashcompinit",
    ]
    assert "\n".join(lines[3:]) + "\n" == rest
    assert "bash" in head
