# SPDX-License-Identifier: Apache-2.0
"""The number of accepted flags of Megatron-LM's functional tests does not decrease."""

from __future__ import annotations

import re
from pathlib import Path

from tools.upstream_flags import figures, is_accepted

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
