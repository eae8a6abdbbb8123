# SPDX-License-Identifier: Apache-2.0
"""The command line of a schema: flags, `--config`, `--print-config`, `--help` and shell completion.

Values come from the schema's own parser (`schema.py`), so flags work wherever Python does.
`--help` and `--tyro-print-completion SHELL` are drawn by tyro from the same classes; without tyro
help is plain text.

Order of precedence: defaults < `--config file.yaml` < flags. A flag given twice counts the last
time, as is usual for scripts that append overrides.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron.training.schema import Option, build, flatten, option_docs, options, suggest
from megatron.training.yaml_file import read_options, write_options

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """Options about options."""

    config: str | None = None
    """YAML file with defaults for any option; flags win over it."""
    print_config: bool = False
    """Print the resolved options as YAML, which --config reads back, and stop."""


@dataclass(frozen=True)
class CommandLine(Generic[T]):
    """What a command line said: the schema's object and the options about options."""

    config: T
    invocation: Invocation


class HelpRequested(Exception):
    """The user asked for help or completion; `text` is what to print before exiting with 0."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse_command_line(
    schema: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    print_now: bool = True,
) -> CommandLine[T]:
    """Parse the arguments of an entry point.

    Args:
        schema: dataclass of options or of sections of options.
        argv: arguments without the program's name.
        prog: how the program is called, for help.
        description: one line on what it does, for help.
        print_now: whether `--print-config` prints what was parsed; False leaves that to a caller
            that derives more first and then calls `show_config`.

    Raises:
        HelpRequested: `--help`, `-h`, `--tyro-print-completion` or `--print-config`.
        ValueError: unknown flag, bad value, missing option; one line.
    """
    if {"-h", "--help"} & set(argv):
        raise HelpRequested(help_text(schema, prog=prog, description=description))
    if "--tyro-print-completion" in argv:
        raise HelpRequested(_completion(schema, argv, prog))
    known = options(schema)
    about = options(Invocation)
    given = read_flags(argv, [*known, *about])
    invocation = build(Invocation, {o.name: given.pop(o.name) for o in about if o.name in given})
    values = read_options(invocation.config, known) if invocation.config else {}
    line = CommandLine(build(schema, {**values, **given}), invocation)
    if print_now:
        show_config(line)
    return line


def show_config(line: CommandLine[T], *, notes: Mapping[str, str] | None = None) -> None:
    """Print the options and stop, if `--print-config` asks for it.

    Args:
        line: the command line, with every derived option filled in.
        notes: further facts for comments at the top, by name.

    Raises:
        HelpRequested: it does ask; the text is YAML that `--config` reads back.
    """
    if line.invocation.print_config:
        config = line.config
        raise HelpRequested(write_options(flatten(config), options(type(config)), notes=notes))


def read_flags(argv: Sequence[str], known: Sequence[Option]) -> dict[str, Any]:
    """Turn arguments into values by option name.

    `--name VALUE`, `--name=VALUE`, `--name V1 V2 ...` for options of many values, `--name` /
    `--no-name` for switches. `_` and `-` are alike in a flag.

    Raises:
        ValueError: the first flag that is unknown or has a wrong value.
    """
    by_name = {option.name: option for option in known}
    spellings = dict(by_name)
    spellings.update({_negative(o.name): o for o in known if o.kind is bool})
    values: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ValueError(f"unexpected argument {word!r}: options start with --")
        name, equals, inline = word[2:].partition("=")
        name = name.replace("_", "-")
        if name not in spellings:
            raise ValueError(f"unknown flag --{name}{suggest(name, spellings, prefix='--')}")
        option = spellings[name]
        texts = [inline] if equals else []
        if option.kind is bool:
            if equals or (rest and not rest[0].startswith("--")):
                raise ValueError(f"--{name} takes no value: write --{name} or --{_negative(name)}")
            values[option.name] = name == option.name
            continue
        while rest and not equals and not rest[0].startswith("--") and (option.many or not texts):
            texts.append(rest.pop(0))
        if not texts:
            raise ValueError(f"--{name} needs a value")
        values[option.name] = option.parse(texts, f"--{name}")
    return values


def _negative(name: str) -> str:
    """Return the spelling that turns a switch off."""
    return name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"


def _with_invocation(schema: type) -> type:
    """Return a schema that also has the options about options, for help and completion."""
    hints = typing.get_type_hints(schema)
    sections = [(f.name, hints[f.name]) for f in dataclasses.fields(schema)]
    if not all(dataclasses.is_dataclass(hint) for _, hint in sections):
        sections = [("program", schema)]
    return dataclasses.make_dataclass(
        "Options", [("general", Invocation), *sections], frozen=True, kw_only=True
    )


def help_text(schema: type, *, prog: str, description: str) -> str:
    """Return the help of an entry point, by tyro where it is installed, else as plain text."""
    try:
        import tyro
    except ImportError:
        return _plain_help(schema, prog=prog, description=description)
    return _tyro_output(tyro, schema, ["--help"], prog, description)


def _completion(schema: type, argv: Sequence[str], prog: str) -> str:
    try:
        import tyro
    except ImportError:
        raise ValueError("shell completion needs tyro: pip install tyro") from None
    at = list(argv).index("--tyro-print-completion")
    return _tyro_output(tyro, schema, list(argv[at : at + 2]), prog, "")


def _tyro_output(tyro: Any, schema: type, argv: list[str], prog: str, description: str) -> str:
    """Return what tyro prints for `argv`."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        tyro.cli(
            _with_invocation(schema),
            args=argv,
            prog=prog,
            description=description,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    return out.getvalue()


def _plain_help(schema: type, *, prog: str, description: str) -> str:
    lines = [f"usage: {prog} [--config FILE] [options]", "", description]
    section: str | None = ""
    docs = {**option_docs(Invocation), **option_docs(schema)}
    for option in [*options(Invocation), *options(schema)]:
        if option.section != section:
            section = option.section
            lines += ["", f"{(section or 'general').replace('_', ' ')} options:"]
        value = (
            ""
            if option.kind is bool
            else " "
            + (
                "{" + ",".join(option.choices) + "}"
                if option.choices
                else option.kind.__name__.upper()
            )
        )
        default = "required" if option.required else f"default: {option.default}"
        lines.append(f"  --{option.name}{value}  {docs[option.name]} ({default})")
    return "\n".join(lines) + "\n"
