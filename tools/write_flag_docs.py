# SPDX-License-Identifier: Apache-2.0
"""Write docs/flags.md: every option of the programs from their schemas, and what answers others.

python tools/write_flag_docs.py
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.cli.flags import KINDS, Invocation, default_text, value_text
from megatron.cli.megatron_names import (
    ALIASES,
    VALUE_NAMES,
    Answer,
    answered,
    answered_prefixes,
)
from megatron.cli.schema import Option, option_docs, options, section_titles
from megatron.hf.convert import ExportConfig, ImportConfig
from megatron.inference.bench import BenchConfig
from megatron.inference.generate_config import GenerateConfig
from megatron.inference.serve import ServeConfig
from megatron.training.checkpointing.commands.options import (
    CompareConfig,
    ConvertConfig,
    InspectConfig,
    ListConfig,
    VerifyConfig,
)
from megatron.training.config import Config
from megatron.training.config.megatron_flags import NO_EFFECT, TRANSLATED
from megatron.training.data.encoder import PreprocessConfig
from megatron.training.inspect_data import InspectDataConfig
from megatron.training.train_tokenizer import TrainTokenizerConfig
from megatron.training.upcycle import UpcycleConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

_INTRODUCTION = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by tools/write_flag_docs.py from the schema in megatron/training/config. -->
# Flags

Flags have Megatron's names where Megatron has the same option. Write `--name VALUE` or
`--name=VALUE`, and `--name` or `--no-name` for a switch; `_` and `-` are equivalent. YAML files use
the same names as keys.

- `--config run.yaml` sets defaults, which flags override. `${NAME}` in a value is replaced by the
  environment variable `NAME`; write `$${` for a literal `${`. Unknown and repeated keys are errors
  with file and line.
- `--print-config` prints the resolved configuration as YAML that `--config` can read, and exits.
  Every checkpoint stores the same options; `--use-checkpoint-args` loads the model's options from
  there.
- If a flag is given twice, the last value applies. A note on stderr reports this, and also reports
  each flag that overrides `--config`. `--strict-flags` rejects repeated flags.
- An unknown flag or value is an error. Errors exit with code 2. One line reports all problems of
  the same kind: misspelled or missing options first, then values out of range, then options that
  cannot be combined.
- `eval "$(python -m megatron.training.pretrain_gpt --print-completion bash)"` enables completion of
  flags in bash. Replace `bash` by `zsh` for zsh.
- Options appear in logs and checkpoints, so passwords are rejected. Services read their passwords
  from the environment.

"""

_ANSWERS = """\
## Unsupported flags of Megatron and other programs

Each of these flags is an error of one line that names the alternative, and the run does not start.

"""

_TRANSLATED = """\
## Flags of Megatron that are translated

The training scripts translate these flags into options, and report the translation at the start of
a run.

"""

_NO_EFFECT = """\
## Flags of Megatron that have no effect here

The training scripts accept these flags, on the command line and in `--config`, and list the given
ones at the start of a run. `--strict-flags` rejects them. There are three kinds: *already so*
(every run behaves as the flag requests), *reporting only* and *speed only*. Values other than those
below are rejected. Other programs do not accept these flags.

"""

_ALIASES = """\
## Other names of options

"""

_NAMES = """\
## Values by Megatron's names

Megatron's values on the left are read as the values on the right, which `--print-config` and
checkpoints show.

"""


PROGRAMS: Mapping[str, type] = types.MappingProxyType(
    {
        "megatron.training.pretrain_gpt": Config,
        "megatron.training.preprocess_data": PreprocessConfig,
        "megatron.training.train_tokenizer": TrainTokenizerConfig,
        "megatron.training.inspect_data": InspectDataConfig,
        "megatron.training.upcycle": UpcycleConfig,
        "megatron.training.checkpoint list": ListConfig,
        "megatron.training.checkpoint inspect": InspectConfig,
        "megatron.training.checkpoint verify": VerifyConfig,
        "megatron.training.checkpoint compare": CompareConfig,
        "megatron.training.checkpoint convert": ConvertConfig,
        "megatron.inference.generate": GenerateConfig,
        "megatron.inference.bench": BenchConfig,
        "megatron.inference.serve": ServeConfig,
        "megatron.hf.convert import": ImportConfig,
        "megatron.hf.convert export": ExportConfig,
    }
)

_HEADER = ["flag", "value", "default", "meaning"]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _rows(section_options: list[Option], docs: dict[str, str]) -> list[list[str]]:
    return [
        [
            f"`--{option.name}`",
            _cell(value_text(option).replace(",", ", ")) or "switch",
            _cell(default_text(option)),
            _cell(docs[option.name]),
        ]
        for option in section_options
    ]


def _program(name: str, schema: type) -> Iterator[str]:
    """Yield the part of one program: a table for each section of its options."""
    yield f"## `python -m {name}`\n\n"
    docs = option_docs(schema)
    groups = [(None, ""), *section_titles(schema).items()]
    for section, title in groups:
        section_options = [option for option in options(schema) if option.section == section]
        if section_options:
            yield f"### {title.rstrip('.')}\n\n" if title else ""
            yield table(_HEADER, _rows(section_options, docs))


def _harmless() -> Iterator[list[str]]:
    """Yield the table rows of flags without effect, grouped by kind and reason."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for flag in sorted(NO_EFFECT, key=lambda flag: KINDS.index(flag.kind)):
        values = flag.values or "switch"
        if flag.option.choices:
            values = " ".join(f"`{choice}`" for choice in flag.option.choices)
        reason = _cell("; ".join(filter(None, [flag.reason, flag.note])))
        grouped.setdefault((values, flag.kind, reason), []).append(f"`--{flag.name}`")
    for key, names in grouped.items():
        yield [" ".join(names), *key]


def _translations() -> Iterator[list[str]]:
    """Yield the rows of flags that are translated into options."""
    for option, meaning in TRANSLATED.items():
        values = " ".join(f"`{choice}`" for choice in option.choices)
        yield [f"`--{option.name}`", values or value_text(option) or "switch", _cell(meaning)]


def _instead(answer: Answer) -> tuple[str, str]:
    """Return what to do about a flag that is not here, and the reason."""
    nearest = f"`--{answer.nearest}`" if answer.nearest else ""
    if answer.unsupported:
        return f"not supported{f', nearest: {nearest}' if nearest else ''}", answer.reason
    return nearest or "leave it out", answer.reason


def _paragraphs() -> Iterator[str]:
    """Yield the parts of the page."""
    yield _INTRODUCTION
    yield "## Options of every program\n\n"
    yield table(_HEADER, _rows(options(Invocation), option_docs(Invocation)))
    for name, schema in PROGRAMS.items():
        yield from _program(name, schema)
    yield _NAMES
    values = [
        [f"`--{flag}`", f"`{foreign_name}`", f"`{local_name}`"]
        for flag, pairs in VALUE_NAMES.items()
        for foreign_name, local_name in pairs.items()
    ]
    yield table(["flag", "Megatron's value", "value here"], values)
    yield _ALIASES
    aliases = [
        [f"`--{name}`", f"`--{option} {value}`" if value else f"`--{option}`"]
        for name, (option, value) in ALIASES.items()
    ]
    yield table(["flag", "read as"], aliases)
    yield _TRANSLATED
    yield table(["flag", "values", "read as"], list(_translations()))
    yield _NO_EFFECT
    yield table(["flag", "values", "kind", "what happens here"], list(_harmless()))
    yield _ANSWERS
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, answer in answered().items():
        grouped.setdefault(_instead(answer), []).append(f"`--{name}`")
    for prefix, answer in answered_prefixes().items():
        grouped.setdefault(_instead(answer), []).append(f"`--{prefix}...`")
    rows = [[" ".join(names), fix, _cell(reason)] for (fix, reason), names in grouped.items()]
    yield table(["flag", "instead", "reason"], rows).rstrip() + "\n"


def page() -> str:
    """Return the text of docs/flags.md."""
    return "".join(_paragraphs())


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
