# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM: the accepted ones, their defaults, and the pages that list them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron.cli.megatron_names import ALIASES, answered
from megatron.cli.schema import options
from megatron.training.config import Config
from megatron.training.config.megatron_flags import NO_EFFECT
from tests.support.upstream_flags import FOLDER, figures, is_accepted
from tools.write_flag_docs import PAGE, page

DOCS = Path(__file__).parents[3] / "docs"


def test_accepted_upstream_flags_do_not_decrease():
    counts = figures()
    assert (counts.uses, counts.configs) == (15365, 221)
    assert counts.accepted >= 14400
    assert counts.flags - counts.refused.total() >= 12358
    assert counts.unchanged >= 150


def test_flag_acceptance_depends_on_the_value():
    assert is_accepted(["--ckpt-format", "torch_dist"])
    assert not is_accepted(["--ckpt-format", "tar"])
    assert is_accepted(["--seed", "${REPEAT}"])
    assert is_accepted(["--fp8-format", "hybrid"])
    assert not is_accepted(["--fp8-format", "e5m2"])


def test_migration_page_agrees_with_the_parser():
    """The parser accepts or refuses each flag of the page's script as the page states."""
    page = (DOCS / "from-megatron-lm.md").read_text(encoding="utf-8")
    table = page.partition("## A script, line by line")[2].partition("\n\n`tests/")[0]
    rows = re.findall(r"^\| `(--.*?)` \| (kept|remove)", table, re.MULTILINE)
    assert {answer for _, answer in rows} == {"kept", "remove"}
    for flags, answer in rows:
        for flag in re.split(r" (?=--)", flags):
            words = [word for word in flag.split() if word != "..."]
            accepted = is_accepted([*words, "8"] if flag.endswith("...") else words)
            assert accepted == (answer == "kept"), flag


def test_flag_page_is_current_and_lists_every_flag():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python tools/write_flag_docs.py"
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    flags = {word.strip("`") for line in rows for word in line.split("|")[1].split()}
    assert {f"--{option.name}" for option in options(Config)} <= flags
    assert {f"--{name}" for name in (*answered(), *ALIASES)} <= flags
    assert {f"--{flag.name}" for flag in NO_EFFECT} <= flags


#: Options with another default, and the reason.
DIFFERENT = {
    "num-query-groups": "none: --group-query-attention asks for it",
    "moe-layer-freq": "derived: every layer, as 1 is",
    "split": "derived there: 969,30,1 where --data-path is given",
    "dataloader-type": "derived there: single",
    "moe-z-loss-coeff": "0 is none",
    "moe-input-jitter-eps": "0 is none",
    "cp-comm-type": "the one that moves least; results are equal up to rounding",
    "moe-token-dispatcher-type": "the one that moves least; results are equal up to rounding",
    "moe-shared-expert-overlap": "on; results are equal",
    "tiktoken-num-special-tokens": "derived: 1000 for the kind of file that it is for there",
    "transformer-impl": "TransformerEngine is an extra",
    "data-parallel-sharding-strategy": "derived: no_shard, or optim by --use-distributed-optimizer",
    "exit-signal-handler": "on: SIGTERM saves before it ends the run",
}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(value)


def _same(default: str, upstream: str) -> bool:
    try:
        return float(default) == float(upstream)
    except ValueError:
        return default == upstream


def test_defaults_match_megatron_except_listed_options():
    lines = (FOLDER / "defaults.tsv").read_text(encoding="utf-8").splitlines()
    upstream = dict(line.split("\t") for line in lines[2:])
    defaults = {option.name: _text(option.default) for option in options(Config)}
    assert not upstream.keys() - defaults.keys()
    assert len(upstream) > 170
    differing = {name for name, value in upstream.items() if not _same(defaults[name], value)}
    assert differing == DIFFERENT.keys()
    assert defaults["split"] == "969,30,1"
