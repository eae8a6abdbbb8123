# SPDX-License-Identifier: Apache-2.0
"""docs/flags.md matches the current schema."""

from __future__ import annotations

from megatron.cli.megatron_names import ALIASES, answered
from megatron.cli.schema import options
from megatron.training.config import Config
from megatron.training.config.megatron_flags import NO_EFFECT
from tools.write_flag_docs import PAGE, page


def test_flag_page_is_current_and_lists_every_flag():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python tools/write_flag_docs.py"
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    flags = {word.strip("`") for line in rows for word in line.split("|")[1].split()}
    assert {f"--{option.name}" for option in options(Config)} <= flags
    assert {f"--{name}" for name in (*answered(), *ALIASES)} <= flags
    assert {f"--{flag.name}" for flag in NO_EFFECT} <= flags
