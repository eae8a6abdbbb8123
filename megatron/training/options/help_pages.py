# SPDX-License-Identifier: Apache-2.0
"""The help of an entry point: its options by section, by tyro, or as plain text without it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import typing
from typing import Any

from megatron.training.options.schema import Option, option_docs, options, section_titles


def help_text(schema: type, *, about: type, prog: str, description: str) -> str:
    """Return the help of an entry point, by tyro where it is installed, else as plain text.

    Args:
        schema: the options of the program.
        about: the options about options, which come first.
        prog: how the program is called.
        description: one line on what it does.
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
        if option.field.endswith("_"):  # tyro keeps the mark of a word of Python
            text = text.replace(f"--{option.field} ", f"--{option.name}  ")
    return text


def _joined(schema: type, about: type) -> type:
    """Return a schema that also has the options about options."""
    hints = typing.get_type_hints(schema)
    sections = [(f.name, hints[f.name]) for f in dataclasses.fields(schema)]
    if not all(dataclasses.is_dataclass(hint) for _, hint in sections):
        sections = [("program", schema)]
    return dataclasses.make_dataclass(
        "Options", [("general", about), *sections], frozen=True, kw_only=True
    )


def value_text(option: Option) -> str:
    """Return what may follow a flag, `{adam,sgd}` or `INT ...`; nothing for a switch."""
    if option.kind is bool:
        return ""
    one = "{" + ",".join(option.choices) + "}" if option.choices else option.kind.__name__.upper()
    return f"{one} ..." if option.many else one


def default_text(option: Option) -> str:
    """Return an option's default as YAML spells it, or `required`."""
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
