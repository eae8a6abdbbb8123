# SPDX-License-Identifier: Apache-2.0
r"""List, inspect, verify, compare and convert checkpoints.

    python -m megatron.training.checkpoint list runs/a
    python -m megatron.training.checkpoint inspect runs/a/iter_0000100 --tensors "*.mlp.*"
    python -m megatron.training.checkpoint verify runs/a
    python -m megatron.training.checkpoint compare runs/a runs/b --tolerance 1e-5
    python -m megatron.training.checkpoint convert runs/a a.safetensors \
        --from native --to single-file

Exits with 0; with 1 if something is damaged or differs, as cmp does; with 2 for wrong arguments;
with 141 if the reader of the output closes it early, such as head in a pipe. One process, whose
memory does not grow with the checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.cli.errors import one_line, run_entry_point
from megatron.cli.flags import HelpRequested, parse_command_line
from megatron.cli.standard_streams import run_command
from megatron.training.checkpointing.commands.options import (
    CompareConfig,
    ConvertConfig,
    ConvertToNativeConfig,
    InspectConfig,
    ListConfig,
    VerifyConfig,
)

PROG = "python -m megatron.training.checkpoint"


class Command(NamedTuple):
    """A command: its options, its positional options, and the function that implements it.

    `work` takes the parsed options and returns the exit code.
    """

    schema: type
    operands: tuple[str, ...]
    work: Callable[[Any], int]


def _list(config: ListConfig) -> int:
    from megatron.training.checkpointing.commands.inspection import list_root

    return list_root(config)


def _inspect(config: InspectConfig) -> int:
    from megatron.training.checkpointing.commands.inspection import inspect_folder

    return inspect_folder(config)


def _verify(config: VerifyConfig) -> int:
    from megatron.training.checkpointing.commands.inspection import verify_folders

    return verify_folders(config)


def _compare(config: CompareConfig) -> int:
    from megatron.training.checkpointing.commands.comparison import compare_folders

    return compare_folders(config)


def _convert(config: ConvertConfig | ConvertToNativeConfig) -> int:
    from megatron.training.checkpointing.commands.conversion import convert

    return convert(config)


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "list": Command(ListConfig, ("root",), _list),
        "inspect": Command(InspectConfig, ("folder",), _inspect),
        "verify": Command(VerifyConfig, ("folder",), _verify),
        "compare": Command(CompareConfig, ("first", "second"), _compare),
        "convert": Command(ConvertToNativeConfig, ("source", "target"), _convert),
    }
)


def run(argv: Sequence[str]) -> int:
    """Run a command and return the exit code. Raises ValueError."""
    name, words = (argv[0], list(argv[1:])) if argv else ("", [])
    if name in ("-h", "--help"):
        raise HelpRequested(_overview())
    if name not in COMMANDS:
        raise ValueError(f"{name or 'nothing'!r} is not a command: use {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    if name == "convert":
        command = command._replace(schema=_schema_of_convert(words))
    line = parse_command_line(
        command.schema,
        _with_flags(name, command, words),
        prog=" ".join([PROG, name, *(operand.upper() for operand in command.operands)]),
        description=str(command.schema.__doc__),
    )
    from megatron.core.dist_checkpointing.shard_format import (
        CheckpointError,
        DamagedCheckpointError,
    )

    try:
        return command.work(line.config)
    except DamagedCheckpointError as error:
        print(f"{PROG}: {one_line(error)}", file=sys.stderr, flush=True)
        return 1
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def _schema_of_convert(words: Sequence[str]) -> type:
    """Return the options of `convert`: options of the model exist only for --to native.

    Raises:
        ValueError: --to is missing, so that it is unknown whether options of the model are
            required.
    """
    to = _value_of("--to", words)
    if to == "single-file":
        return ConvertConfig
    elsewhere = {"-h", "--help"} & set(words) or _value_of("--config", words) is not None
    if to is None and not elsewhere:
        absent = [flag for flag in ("--from", "--to") if _value_of(flag, words) is None]
        raise ValueError(f"missing {', '.join(absent)}: give {'them' if absent[1:] else 'it'}")
    return ConvertToNativeConfig


def _with_flags(name: str, command: Command, words: Sequence[str]) -> list[str]:
    """Return the arguments with the operands turned into named flags.

    `--tensors` without a pattern means all tensors.
    """
    remaining = list(words)
    count = next((i for i, word in enumerate(remaining) if word.startswith("-")), len(remaining))
    if count > len(command.operands):
        operands = " ".join(operand.upper() for operand in command.operands)
        raise ValueError(
            f"unexpected argument {remaining[len(command.operands)]!r}: {name} takes {operands}"
        )
    flags = []
    for operand, word in zip(command.operands, remaining[:count], strict=False):
        flags += [f"--{operand}", word]
    for i, word in enumerate(remaining[count:], start=count):
        flags.append(word)
        has_no_value = i + 1 == len(remaining) or remaining[i + 1].startswith("--")
        if word == "--tensors" and command.schema is InspectConfig and has_no_value:
            flags.append("*")
    return flags


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """Return the value of a flag in unparsed arguments; None without the flag."""
    for word, next_word in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            return next_word
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return None


def _overview() -> str:
    lines = []
    for name, command in COMMANDS.items():
        operands = " ".join(operand.upper() for operand in command.operands)
        lines.append(f"  {name} {operands}  {command.schema.__doc__}")
    body = "\n".join(lines)
    return (
        f"usage: {PROG} COMMAND ... [options]\n\n{body}\n\n"
        f"Options of a command: {PROG} COMMAND --help\n"
    )


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and return its exit code."""
    codes: list[int] = []
    ended = run_entry_point(lambda: codes.append(run(argv)), prog=PROG)
    return ended or codes[0] if codes else ended


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], os.environ))
