# SPDX-License-Identifier: Apache-2.0
"""Read the facts of one page for the figures: long sentences and references."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.language.source_facts import Facts, references

LONG, VERY_LONG = 35, 50
#: Pages whose lists a tool writes.
GENERATED = ("docs/status.md",)


def prose(text: str) -> Iterator[list[tuple[str, int]]]:
    """Yield each paragraph or list item as (word, line): no code, table, heading or comment."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"```.*?```|<!--.*?-->", blank, text, flags=re.DOTALL)
    paragraph: list[tuple[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        is_prose = not line.lstrip().startswith(("|", "#", "!["))
        if not line.strip() or not is_prose or re.match(r"\s*([-*]|\d+[.)])\s", line):
            yield paragraph
            paragraph = []
        if is_prose:
            paragraph += [(word, number) for word in line.split()]
    yield paragraph


def sentences(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, words) of every sentence of more than three words."""
    for paragraph in prose(text):
        sentence: list[tuple[str, int]] = []
        for i, (word, line) in enumerate(paragraph):
            sentence.append((word, line))
            following = paragraph[i + 1][0] if i + 1 < len(paragraph) else "."
            ends = word.endswith((".", "!", "?")) and re.match(r"[A-Z`*\[-]", following)
            if ends or i + 1 == len(paragraph):
                if len(sentence) > 3:
                    yield sentence[0][1], [word for word, _ in sentence]
                sentence = []


def read_page(path: str, text: str) -> Facts:
    """Return the facts of one page; `path` is relative to the root."""
    entries, count = [], 0
    for line, words in sentences(text) if path not in GENERATED else ():
        count += 1
        for figure, bound in (("long", LONG), ("very_long", VERY_LONG)):
            if len(words) > bound:
                start = " ".join(words[:6])
                entries.append([figure, line, f"{start} ...", f"{len(words)} words: split it"])
    fenceless = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return {"entries": entries, "sentences": count, "references": list(references(fenceless, 1))}
