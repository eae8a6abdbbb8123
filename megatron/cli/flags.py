# SPDX-License-Identifier: Apache-2.0
"""Parse the command line of a schema: flags, `--config`, `--print-config` and help.

Values are parsed by the schema's own parser (`schema.py`), so flags need no other library. Help
pages (by tyro, or plain text without it) and shell completion are generated from the schema.

Order of precedence: derived defaults < `--config file.yaml` < flags. If a flag is given twice, the
last one is used, as in argparse, and a note reports it.

Megatron flags that are not in the schema are answered by `megatron_names.py`, or accepted by the
caller's `AcceptedFlags`: flags without effect, whose request is fulfilled anyway or only concerns
reporting or speed, and flags that are translated to options. Their values are parsed like an
option's, so that a value with an effect is rejected. They are neither options nor in the help.

A program is started as `python -m MODULE` or `torchrun ... -m MODULE`, so the completion script for
bash or zsh completes the words after a module's name. Scripts of several programs may be sourced
into one shell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

from megatron.cli.megatron_names import ALIASES, answer
from megatron.cli.schema import (
    Option,
    build,
    flatten,
    option_docs,
    options,
    section_titles,
    suggest,
)
from megatron.cli.yaml_file import read_options, write_options

#: Shared by all scripts: finds the module in the command line and asks its function for candidates.
_ENGINE = """\
_megatron_complete() {
  local module="" command="" found="" i=1
  COMPREPLY=()
  while [ "$i" -lt "$COMP_CWORD" ]; do
    case "${COMP_WORDS[$i]}" in
      megatron.*) module="${COMP_WORDS[$i]}"; command="${COMP_WORDS[$((i + 1))]}" ;;
    esac
    i=$((i + 1))
  done
  found="_complete_${module//./_}"
  typeset -f "${found}_$command" >/dev/null && found="${found}_$command"
  typeset -f "$found" >/dev/null || return 0
  COMPREPLY=( $(compgen -W "$("$found" "${COMP_WORDS[$((COMP_CWORD - 1))]}")" \\
    -- "${COMP_WORDS[$COMP_CWORD]}") )
}
complete -o default -F _megatron_complete python python3 torchrun
"""

_ZSH = """\
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(program_options: Sequence[Option], prog: str, shell: str) -> str:
    """Return a script that completes a program's flags and enumerable values.

    Args:
        program_options: the options.
        prog: the program's command, `python -m MODULE` or `python -m MODULE COMMAND`.
        shell: bash or zsh.
    """
    words = prog.split()
    module = " ".join(words[words.index("-m") + 1 :] if "-m" in words else words[-1:])
    spellings = [f"--{o.name}" for o in program_options] + [
        f"--no-{o.name}" for o in program_options if o.kind is bool
    ]
    cases = [
        f"    --{o.name}) echo '{' '.join(o.choices)}' ;;" for o in program_options if o.choices
    ]
    # After any other flag with a value, the shell completes file names.
    flags_with_values = "|".join(
        f"--{o.name}" for o in program_options if not o.choices and o.kind is not bool
    )
    function = "\n".join(
        [
            f"_complete_{module.replace('.', '_').replace(' ', '_')}() {{",
            '  case "$1" in',
            *cases,
            *([f"    {flags_with_values}) ;;"] if flags_with_values else []),
            f"    *) echo '{' '.join(['--help', *spellings])}' ;;",
            "  esac",
            "}",
        ]
    )
    start = f"# Completion of {module} for {shell}; source it, from your shell's start-up file.\n"
    return start + (_ZSH if shell == "zsh" else "") + function + "\n" + _ENGINE


def help_text(schema: type, *, about: type, prog: str, description: str) -> str:
    """Return the help of an entry point, formatted by tyro if it is installed, else as plain text.

    Args:
        schema: the options of the program.
        about: the general options, which come first.
        prog: the program's command.
        description: one line about the program.
    """
    try:
        import tyro
    except ImportError:
        return _plain_help(schema, about, prog=prog, description=description)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        tyro.cli(
            _joined(schema, about),
            args=["--help"],
            prog=prog,
            description=description,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    text = out.getvalue()
    for option in options(schema):
        if option.field.endswith("_"):  # tyro keeps the underscore that avoids a Python keyword
            text = text.replace(f"--{option.field} ", f"--{option.name}  ")
    return text


def _joined(schema: type, about: type) -> type:
    """Return a schema that contains the general options too."""
    hints = typing.get_type_hints(schema)
    sections = [(f.name, hints[f.name]) for f in dataclasses.fields(schema)]
    if not all(dataclasses.is_dataclass(hint) for _, hint in sections):
        sections = [("program", schema)]
    return dataclasses.make_dataclass(
        "Options", [("general", about), *sections], frozen=True, kw_only=True
    )


def value_text(option: Option) -> str:
    """Return the value syntax of a flag, `{adam,sgd}` or `INT ...`; empty for a switch."""
    if option.kind is bool:
        return ""
    value = "{" + ",".join(option.choices) + "}" if option.choices else option.kind.__name__.upper()
    return f"{value} ..." if option.many else value


def default_text(option: Option) -> str:
    """Return an option's default in YAML syntax, or `required`."""
    if option.required:
        return "required"
    default: Any = option.default
    if default is None or isinstance(default, bool):
        return {None: "none", True: "true", False: "false"}[default]
    return " ".join(map(str, default)) or "none" if isinstance(default, tuple) else str(default)


def _plain_help(schema: type, about: type, *, prog: str, description: str) -> str:
    lines = [f"usage: {prog} [--config FILE] [options]", "", description]
    docs = {**option_docs(about), **option_docs(schema)}
    titles = {None: "Options", **section_titles(schema)}
    groups = [("Options about options", options(about))]
    for section, title in titles.items():
        groups.append((title, [o for o in options(schema) if o.section == section]))
    for title, group in groups:
        if not group:
            continue
        lines += ["", f"{title.rstrip('.')}:"]
        for option in group:
            words = " ".join(filter(None, [f"--{option.name}", value_text(option)]))
            doc = " ".join(docs[option.name].split())
            default = default_text(option)
            lines.append(
                f"  {words}  {doc} ({default if option.required else f'default: {default}'})"
            )
    return "\n".join(lines) + "\n"


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """Options about options."""

    config: str | None = None
    """YAML file with defaults for any option; flags override it."""
    print_config: bool = False
    """Print the resolved options as YAML, which --config accepts, and exit."""
    print_completion: Literal["bash", "zsh"] | None = None
    """Print a shell script that completes these flags, and exit."""
    strict_flags: bool = False
    """Reject flags that have no effect: Megatron flags that are accepted because every run already
    does what they request, or because they only concern reporting or speed, and a flag that a later
    one overrides."""


@dataclass(frozen=True)
class CommandLine(Generic[T]):
    """A parsed command line: the schema's object and the general options.

    Args:
        config: the schema's object.
        invocation: the general options.
        notes: one line per flag without effect, and per value that overrides another.
    """

    config: T
    invocation: Invocation
    notes: tuple[str, ...] = ()


class HelpRequested(Exception):
    """The user requested help or completion; print `text` and exit with 0."""

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
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    replaced: Mapping[str, str] | None = None,
    accepted: AcceptedFlags | None = None,
) -> CommandLine[T]:
    """Parse the arguments of an entry point.

    Args:
        schema: dataclass of options or of sections of options.
        argv: arguments without the program's name.
        prog: the program's command, for help.
        description: one line about the program, for help.
        print_now: whether to print notes to stderr and handle `--print-config`; False leaves both
            to a caller that derives more options first and then calls `show_config`.
        defaults: takes the values of flags and `--config` by option name; returns values for
            options that were not given, which override the schema's defaults.
        replaced: options to request instead of missing ones, see `build`.
        accepted: Megatron flags to accept in addition to the options, as flags and in `--config`.

    Raises:
        HelpRequested: `--help`, `-h`, `--print-completion` or `--print-config`.
        ValueError: unknown flag, bad value, missing option; one line.
    """

    if {"-h", "--help"} & set(argv):
        raise HelpRequested(help_text(schema, about=Invocation, prog=prog, description=description))
    program_options, invocation_options = options(schema), options(Invocation)
    notes: list[str] = []
    accepted = accepted or AcceptedFlags()
    harmless = [flag.option for flag in accepted.no_effect]
    translated = accepted.translated
    values = read_flags(
        argv,
        [*program_options, *invocation_options, *translated],
        harmless=harmless,
        say=notes.append,
    )
    invocation = build(
        Invocation, {o.name: values.pop(o.name) for o in invocation_options if o.name in values}
    )
    if invocation.print_completion is not None:
        raise HelpRequested(
            completion_script(
                [*invocation_options, *program_options], prog, invocation.print_completion
            )
        )
    file: dict[str, Any] = {}
    if invocation.config is not None:
        file = read_options(invocation.config, [*program_options, *harmless, *translated])
        for name in values:
            if name in file and file[name] != values[name]:
                notes.append(f"--{name} overrides {name} in {invocation.config}")
    notes += _accept(accepted, values, file, strict=invocation.strict_flags)
    values = {**file, **values}
    if defaults is not None:
        values = {**defaults(values), **values}
    line = CommandLine(build(schema, values, replaced=replaced), invocation, tuple(notes))
    if print_now:
        for note in notes:
            print(f"{prog.rpartition('.')[2]}: {note}", file=sys.stderr)
        show_config(line)
    return line


def show_config(line: CommandLine[T], *, notes: Mapping[str, str] | None = None) -> None:
    """Print the options and exit if `--print-config` is given.

    Args:
        line: the command line, with every derived option filled in.
        notes: additional comments at the top, by name.

    Raises:
        HelpRequested: `--print-config` is given; the text is YAML that `--config` accepts.
    """
    if line.invocation.print_config:
        config = line.config
        raise HelpRequested(write_options(flatten(config), options(type(config)), notes=notes))


@dataclass(frozen=True)
class _Word:
    """One flag in the arguments.

    Args:
        name: name without leading dashes, `-` between words.
        inline: value after `=`; None if there is none.
        following_words: words up to the next flag.
    """

    name: str
    inline: str | None
    following_words: tuple[str, ...]

    def __str__(self) -> str:
        inline = [] if self.inline is None else [self.inline]
        return " ".join([f"--{self.name}", *inline, *self.following_words])


def _words(argv: Sequence[str]) -> Iterator[_Word]:
    """Split arguments into flags and their words. Raises ValueError for words before the first
    flag."""
    following_words = list(argv)
    while following_words:
        word = following_words.pop(0)
        if not word.startswith("--") or word == "--":
            raise ValueError(f"unexpected argument {word!r}: options start with --")
        end = next(
            (i for i, w in enumerate(following_words) if w.startswith("--")), len(following_words)
        )
        name, equals, inline = word[2:].partition("=")
        yield _Word(
            name.replace("_", "-"), inline if equals else None, tuple(following_words[:end])
        )
        following_words = following_words[end:]


def read_flags(
    argv: Sequence[str],
    known_options: Sequence[Option],
    *,
    harmless: Sequence[Option] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Parse arguments into values by option name.

    The syntax is `--name VALUE`, `--name=VALUE`, `--name V1 V2 ...` for options of many values,
    `--name` / `--no-name` for switches. `_` and `-` are equivalent in a flag. If a flag is given
    twice, the last one is used; with `--strict-flags` that is an error, as is an alias that
    contradicts its option.

    Args:
        argv: the arguments.
        known_options: the options.
        harmless: flags without effect, which are parsed too.
        say: called with a line about each overridden value.

    Raises:
        ValueError: lists every flag that is unknown, has an invalid value or contradicts another,
            in one line.
    """
    strict = "--strict-flags" in {word.replace("_", "-") for word in argv}
    spellings = _spellings(known_options)
    suggested = _Suggestions([*spellings], [] if strict else [option.name for option in harmless])
    spellings.update(_spellings(harmless))
    values: dict[str, Any] = {}
    last_words: dict[str, _Word] = {}  # by option name
    problems: list[str] = []
    for word in _words(argv):
        try:
            option, value = _read(word, spellings, suggested)
            earlier = last_words.get(option.name)
            if earlier is not None and values[option.name] != value:
                # An alias and its option are two flags in Megatron: neither overrides the other.
                contradicts = (
                    earlier.name != word.name and {earlier.name, word.name} & ALIASES.keys()
                )
                if strict or contradicts:
                    raise ValueError(f"{earlier} and {word} contradict: keep one")
                say(f"{word} overrides {earlier}, which precedes it")
        except ValueError as error:
            problems.append(str(error))
            continue
        values[option.name] = value
        last_words[option.name] = word
    if problems:
        raise ValueError("; ".join(problems))
    return values


def _spellings(known_options: Sequence[Option]) -> dict[str, Option]:
    """Return the options by every spelling of their flags."""
    by_name = {option.name: option for option in known_options}
    switches = [option for option in known_options if option.kind is bool and not option.one_way]
    return {**by_name, **{negative(option.name): option for option in switches}}


@dataclass(frozen=True)
class _Suggestions:
    """Names to suggest for an unknown flag.

    Args:
        options: names of options and their negative forms.
        harmless: names of flags without effect.
    """

    options: Sequence[str]
    harmless: Sequence[str]

    def text(self, name: str) -> str:
        """Return the suggestion for a name; empty if there is none."""
        return suggest(name, self.options, prefix="--", harmless=self.harmless)


def _read(
    word: _Word, spellings: Mapping[str, Option], suggested: _Suggestions
) -> tuple[Option, Any]:
    """Return the option of a flag, and its value. Raises ValueError."""
    option = spellings.get(word.name)
    if option is not None:
        return option, _value(option, word)
    name, text = ALIASES.get(word.name, (word.name, ""))
    option = spellings.get(name)
    if option is None:
        raise ValueError(_unknown(word, spellings, suggested))
    if not text:
        return option, _value(option, word)
    if word.inline is not None or word.following_words:
        raise ValueError(f"--{word.name} takes no value: it stands for --{name} {text}")
    return option, option.parse([text], f"--{word.name}")


def _unknown(word: _Word, spellings: Mapping[str, Option], suggested: _Suggestions) -> str:
    """Return the error for an unknown flag, with advice if Megatron has it."""
    megatron_answer = answer(word.name)
    if megatron_answer is not None and (
        megatron_answer.nearest is None or megatron_answer.nearest in spellings
    ):
        return megatron_answer.text(f"--{word.name}")
    return f"unknown flag --{word.name}{suggested.text(word.name)}"


def _value(option: Option, word: _Word) -> Any:
    """Return the value that a flag gives its option. Raises ValueError."""
    name, texts = word.name, list(word.following_words)
    if option.kind is bool:
        if word.inline is not None or texts:
            negative_form = "" if option.one_way else f" or --{negative(name)}"
            raise ValueError(f"--{name} takes no value: write --{name}{negative_form}")
        return name == option.name
    if word.inline is not None:
        texts.insert(0, word.inline)
    if not texts:
        raise ValueError(f"--{name} needs a value")
    if len(texts) > 1 and (word.inline is not None or not option.many):
        raise ValueError(f"unexpected argument {texts[1]!r} after --{name}: options start with --")
    return option.parse(texts, f"--{name}")


def negative(name: str) -> str:
    """Return the flag that turns a switch off."""
    return name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"


Kind: TypeAlias = Literal["already so", "reporting only", "speed only"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_TYPES: Mapping[str, type] = {"INT": int, "FLOAT": float, "TEXT": str}


@dataclass(frozen=True, kw_only=True)
class NoEffectFlag:
    """A flag that has no effect.

    Args:
        name: name without leading dashes.
        kind: why it is harmless.
        reason: what the program does instead.
        values: values without effect, joined by `|`; INT, FLOAT or TEXT for any value of that type;
            empty for a switch.
        conflict: takes the explicit options; returns an error message if the flag would have an
            effect with them, else None.
        note: additional line at the start of a run; None if the list of flags is enough.
    """

    name: str
    kind: Kind
    reason: str
    values: str = ""
    conflict: Callable[[Mapping[str, Any]], str | None] = lambda options: None
    note: str | None = None

    @property
    def option(self) -> Option:
        """The flag as an option, for parsing."""
        if not self.values:
            return Option(name=self.name, section=None, field=self.name, kind=bool, one_way=True)
        kind = _TYPES.get(self.values)
        choices = () if kind else tuple(self.values.split("|"))
        return Option(
            name=self.name, section=None, field=self.name, kind=kind or str, choices=choices
        )

    def problem(self, value: Any, values: Mapping[str, Any], *, strict: bool) -> str | None:
        """Return the problem of the flag in combination with the explicit options, or None."""
        if value is False:
            return f"{self.name} is false: leave it out: {self.reason}"
        if (conflict := self.conflict(values)) is not None:
            return conflict
        if strict:
            return (
                f"--{self.name} has no effect here ({self.kind}: {self.reason}): leave it out, as "
                "--strict-flags requires"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class AcceptedFlags:
    """The Megatron flags that a program accepts in addition to its options.

    Args:
        no_effect: flags without effect.
        translated: how to parse flags that translate to options of other names.
        translate: takes the values of the command line and of the file, and replaces translated
            flags in both by options; returns lines for the start of the run. Raises ValueError.
    """

    no_effect: Sequence[NoEffectFlag] = ()
    translated: Sequence[Option] = ()
    translate: Callable[[dict[str, Any], dict[str, Any]], list[str]] = lambda flags, file: []


def _accept(
    accepted: AcceptedFlags, flags: dict[str, Any], file: dict[str, Any], *, strict: bool
) -> list[str]:
    """Replace accepted flags by options, or remove those without effect.

    Args:
        accepted: the accepted flags.
        flags: values of the command line, by name.
        file: values of `--config`, by name.
        strict: whether to reject flags without effect.

    Returns lines for the start of the run: the list of flags without effect, their notes, and the
    translations.

    Raises:
        ValueError: lists all rejected flags in one line.
    """
    options = {**file, **flags}
    problems: list[str] = []
    lines: list[str] = []
    uses = [flag for flag in accepted.no_effect if flag.name in options]
    for flag in uses:
        problem = flag.problem(options[flag.name], options, strict=strict)
        problems += [] if problem is None else [problem]
        for values in (flags, file):
            values.pop(flag.name, None)
    flags_by_kind = []
    for kind in KINDS:
        names = [f"--{flag.name}" for flag in uses if flag.kind == kind]
        if names:
            flags_by_kind.append(f"{' '.join(names)} ({kind})")
    lines += [f"no effect here: {', '.join(flags_by_kind)}"] if flags_by_kind else []
    for flag in uses:
        if flag.note:
            value = f" {options[flag.name]}" if flag.values else ""
            lines.append(f"--{flag.name}{value}: {flag.note}")
    try:
        lines += accepted.translate(flags, file)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    return lines
