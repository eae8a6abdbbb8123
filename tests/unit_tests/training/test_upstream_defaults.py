# SPDX-License-Identifier: Apache-2.0
"""Defaults of options match Megatron-LM, except for the options listed here."""

from __future__ import annotations

from typing import Any

from megatron.cli.schema import options
from megatron.training.config import Config
from tools.upstream_flags import FOLDER

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
