# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/flags.md: every option of the programs from their schemas, and the
answers to other flags. Introductions stand in the page.

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
from megatron.inference.generate import GenerateConfig
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

_EVERY_PROGRAM = "## Options of every program\n"


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


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the parts of the page, with the introductions of the text so far."""

    def introduction(title: str) -> str:
        start = text.index(f"## {title}\n")
        return text[start : text.index("| flag |", start)]

    yield text[: text.index(_EVERY_PROGRAM)]
    yield f"{_EVERY_PROGRAM}\n"
    yield table(_HEADER, _rows(options(Invocation), option_docs(Invocation)))
    for name, schema in PROGRAMS.items():
        yield from _program(name, schema)
    yield introduction("Values by Megatron's names")
    values = [
        [f"`--{flag}`", f"`{foreign_name}`", f"`{local_name}`"]
        for flag, pairs in VALUE_NAMES.items()
        for foreign_name, local_name in pairs.items()
    ]
    yield table(["flag", "Megatron's value", "value here"], values)
    yield introduction("Other names of options")
    aliases = [
        [f"`--{name}`", f"`--{option} {value}`" if value else f"`--{option}`"]
        for name, (option, value) in ALIASES.items()
    ]
    yield table(["flag", "read as"], aliases)
    yield introduction("Flags of Megatron that are translated")
    yield table(["flag", "values", "read as"], list(_translations()))
    yield introduction("Flags of Megatron that have no effect here")
    yield table(["flag", "values", "kind", "what happens here"], list(_harmless()))
    yield introduction("Unsupported flags of Megatron and other programs")
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, answer in answered().items():
        grouped.setdefault(_instead(answer), []).append(f"`--{name}`")
    for prefix, answer in answered_prefixes().items():
        grouped.setdefault(_instead(answer), []).append(f"`--{prefix}...`")
    rows = [[" ".join(names), fix, _cell(reason)] for (fix, reason), names in grouped.items()]
    yield table(["flag", "instead", "reason"], rows).rstrip() + "\n"


def page(text: str) -> str:
    """Return the text of docs/flags.md with new tables."""
    return "".join(_paragraphs(text))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
