# SPDX-License-Identifier: Apache-2.0
"""How many flags of Megatron-LM's functional tests are accepted does not fall."""

from __future__ import annotations

import re
from pathlib import Path

from tools.upstream_flags import figures, is_accepted

DOCS = Path(__file__).parents[3] / "docs"


def test_as_many_of_upstreams_flags_are_accepted_as_before():
    found = figures()
    assert (found.uses, found.configs) == (15365, 221)
    assert found.accepted >= 14400
    assert found.flags - found.refused.total() >= 12358
    assert found.unchanged >= 150


def test_a_value_counts_with_its_flag():
    assert is_accepted(["--ckpt-format", "torch_dist"])
    assert not is_accepted(["--ckpt-format", "tar"])
    assert is_accepted(["--seed", "${REPEAT}"])
    assert is_accepted(["--fp8-format", "hybrid"])
    assert not is_accepted(["--fp8-format", "e5m2"])


def test_the_page_on_moving_says_what_the_parser_does():
    """Each flag of the script that the page goes through is accepted, or refused, as it says."""
    page = (DOCS / "from-megatron-lm.md").read_text(encoding="utf-8")
    table = page.partition("## A script, line by line")[2].partition("\n\n`tests/")[0]
    rows = re.findall(r"^\| `(--.*?)` \| (kept|remove)", table, re.MULTILINE)
    assert {answer for _, answer in rows} == {"kept", "remove"}
    for flags, answer in rows:
        for flag in re.split(r" (?=--)", flags):
            words = [word for word in flag.split() if word != "..."]
            accepted = is_accepted([*words, "8"] if flag.endswith("...") else words)
            assert accepted == (answer == "kept"), flag
