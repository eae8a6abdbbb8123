# SPDX-License-Identifier: Apache-2.0
"""Tell how many of Megatron-LM's flags, as its functional tests give them, are accepted here.

python -m tests.support.upstream_flags [--refused N] [--as-if FLAG ...]
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.cli.flags import read_flags
from megatron.cli.schema import options
from megatron.training.config import Config
from megatron.training.config.megatron_flags import NO_EFFECT, TRANSLATED

FOLDER = Path(__file__).with_name("upstream")

_OPTION_NAMES = [*options(Config), *TRANSLATED]
_HARMLESS = [flag.option for flag in NO_EFFECT]

#: A flag that another project's library would be needed for; what it computes is here.
PRESENT = ("--transformer-impl=transformer_engine",)


#: Position embeddings that are here; "(default)" is upstream's, learned_absolute, as it is here.
POSITIONS = ("(default)", "learned_absolute", "rope", "yarn", "none")


@dataclass(frozen=True)
class Figures:
    """The accepted flags.

    Args:
        uses: number of flag uses in training configurations.
        accepted: number of accepted uses, with each flag's most common value.
        configs: number of configurations that train decoder-only models.
        unchanged: number of configurations without a refused flag and with supported position
            embeddings.
        flags: number of distinct flags in these configurations.
        refused: refused flags with their values, and the number of uses.
    """

    uses: int
    accepted: int
    configs: int
    unchanged: int
    flags: int
    refused: Counter[str]


def _rows(name: str) -> Iterator[dict[str, str]]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    header, *rows = (line.split("\t") for line in lines if not line.startswith("# "))
    for row in rows:
        yield dict(zip(header, row, strict=True))


def is_accepted(words: list[str]) -> bool:
    """Return whether a training program parses a flag with its value, ignoring its effect."""
    if "=".join(words) in PRESENT:
        return True
    if len(words) > 1 and "${" in words[1]:  # a value that a run of it fills in: a number or a path
        return any(is_accepted([words[0], value]) for value in ("1", "path"))
    try:
        read_flags(words, _OPTION_NAMES, harmless=_HARMLESS)
    except ValueError:
        return False
    return True


def _flags(text: str) -> Iterator[list[str]]:
    """Yield the words of each flag in `--a --b=1 --c=[1 2]`."""
    for flag in re.split(r" (?=--)", text.strip()):
        name, equals, value = flag.partition("=")
        if name:
            yield [name, *value.strip("[]").split()] if equals else [name]


def figures() -> Figures:
    """Return the accepted share."""
    uses = accepted = configs = unchanged = total = 0
    for row in _rows("flags.tsv"):
        value = row["commonest_values"].split("; ")[0]
        count = int(row["uses_in_training"])
        uses += count
        words = [row["flag"], *([value] if value else [])]
        accepts = row["today"] == "accepted" or (count and is_accepted(words))
        accepted += count if accepts else 0
    refused: Counter[str] = Counter()
    for row in _rows("configs.tsv"):
        words = [flag for flag in _flags(row["not_accepted_today"]) if not is_accepted(flag)]
        refused.update("=".join([flag[0], " ".join(flag[1:])]).rstrip("=") for flag in words)
        configs += 1
        total += int(row["flags"])
        unchanged += not words and row["position_embedding"] in POSITIONS
    return Figures(uses, accepted, configs, unchanged, total, refused)


def main() -> None:
    """Print the two shares, and on request the most common refused flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refused", type=int, default=0, metavar="N", help="list N refused flags")
    words = parser.parse_args()
    shares = figures()
    share, whole = (
        shares.accepted / shares.uses,
        shares.unchanged / shares.configs,
    )
    print(f"uses in training configs accepted: {shares.accepted} of {shares.uses}, {share:.1%}")
    print(f"configs that parse with no edit: {shares.unchanged} of {shares.configs}, {whole:.1%}")
    left = shares.refused.total()
    print(f"flags of these accepted: {shares.flags - left} of {shares.flags}")
    print(f"({PRESENT[0]} is counted as accepted)")
    for flag, count in shares.refused.most_common(words.refused):
        print(f"{count:6} {flag}")


if __name__ == "__main__":
    main()
