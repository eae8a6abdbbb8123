# SPDX-License-Identifier: Apache-2.0
"""The rows of the parity tests: one covering array over every layout and every setting of a model.

A new axis or a new feature adds a factor here, and is then tested together with all that exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.weight_sharding import STRATEGIES
from tests.support.covering_array import Constraint, Row, covering_array

FACTORS: Mapping[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "dp": (1, 2, 4),
    "pp": (1, 2, 4),
    "schedule": ("1f1b", "interleaved", "zb-h1"),  # interleaved has two chunks a stage
    "cut": ("even", "uneven"),  # of the blocks into stages
    "sequence_parallel": (False, True),
    "placement": STRATEGIES,
    "instances": (1, 2),  # size of the outer axis of hybrid sharding
    "outer": ("no_shard", "optim"),
    "granularity": ("unit", "weight"),
    "bucket": ("small", "large"),
    "overlap": (True, False),
    "early_gather": (False, True),
    "link": ("none", "late"),
    "accumulation": (1, 3, 8),
    "per_token": (False, True),
    "loss_scale": (1.0, 1024.0),
    "tied": (False, True),
    "vocabulary": (61, 9),  # on four ranks the last holds 13 of its 16 rows, or none of its 3
    "groups": (1, 2, 4, 8),
    "norm": ("RMSNorm", "LayerNorm"),
    "qk_norm": (False, True),
    "bias": ("none", "qkv", "all"),
    "gated": (True, False),
    "dropout": (0.0, 0.1),
    "recompute": ("none", "full", "selective"),
}

CUT_WEIGHTS = "optim_grads_params"
_CONSTRAINTS = (
    Constraint(("tp", "sequence_parallel"), lambda tp, sp: tp > 1 or not sp),
    Constraint(("pp", "schedule"), lambda pp, schedule: pp > 1 or schedule == "1f1b"),
    Constraint(("pp", "cut"), lambda pp, cut: pp > 1 or cut == "even"),
    Constraint(("dp", "instances"), lambda dp, instances: instances == 1 or dp == 4),
    Constraint(("placement", "instances"), lambda p, instances: p != "no_shard" or instances == 1),
    Constraint(
        ("placement", "instances", "outer"),
        lambda p, instances, outer: outer == "no_shard" or (p, instances) == (CUT_WEIGHTS, 2),
    ),
    Constraint(("placement", "granularity"), lambda p, g: g == "unit" or p == CUT_WEIGHTS),
    Constraint(("placement", "bucket"), lambda p, bucket: bucket == "large" or p != CUT_WEIGHTS),
    Constraint(("placement", "early_gather"), lambda p, early: p != "no_shard" or not early),
)


def _worlds(low: int, high: int) -> Constraint:
    return Constraint(("tp", "dp", "pp"), lambda tp, dp, pp: low <= tp * dp * pp <= high)


def rows_for_every_change() -> list[Row]:
    """Return all allowed pairs on two and four ranks, those of two stages of two lanes, and three
    rows of eight ranks."""
    small = covering_array(FACTORS, (*_CONSTRAINTS, _worlds(2, 4)), seed=1, candidates=10)
    return small + rows_of_stages_and_lanes() + rows_of_eight()


def rows_of_stages_and_lanes() -> list[Row]:
    """Return all allowed pairs on two stages of two lanes: every schedule carries out the traffic
    of every strategy, which rows of a single lane do not."""
    square = {**FACTORS, "tp": (1,), "dp": (2,), "pp": (2,)}
    return covering_array(square, _CONSTRAINTS, seed=3, candidates=10)


def rows_of_eight() -> list[Row]:
    """Return a row that differs from another of eight ranks in every setting, that one, and one
    of three axes at once."""
    wide = {
        "tp": 4,
        "dp": 2,
        "pp": 1,
        "schedule": "1f1b",
        "cut": "even",
        "sequence_parallel": True,
        "placement": "optim",
        "instances": 1,
        "outer": "no_shard",
        "granularity": "unit",
        "bucket": "small",
        "overlap": True,
        "early_gather": True,
        "link": "none",
        "accumulation": 3,
        "per_token": False,
        "loss_scale": 1024.0,
        "tied": True,
        "vocabulary": 61,
        "groups": 2,
        "norm": "RMSNorm",
        "qk_norm": True,
        "bias": "none",
        "gated": True,
        "dropout": 0.1,
        "recompute": "full",
    }
    deep = {
        "tp": 2,
        "dp": 4,
        "pp": 1,
        "schedule": "1f1b",
        "cut": "even",
        "sequence_parallel": False,
        "placement": CUT_WEIGHTS,
        "instances": 2,
        "outer": "optim",
        "granularity": "weight",
        "bucket": "large",
        "overlap": False,
        "early_gather": False,
        "link": "late",
        "accumulation": 1,
        "per_token": True,
        "loss_scale": 1.0,
        "tied": False,
        "vocabulary": 9,
        "groups": 1,
        "norm": "LayerNorm",
        "qk_norm": False,
        "bias": "all",
        "gated": False,
        "dropout": 0.0,
        "recompute": "selective",
    }
    staged = {**deep, "dp": 2, "pp": 2, "schedule": "zb-h1", "cut": "uneven", "accumulation": 3}
    staged |= {"instances": 1, "outer": "no_shard", "tied": True, "sequence_parallel": True}
    return [wide, deep, staged]


def rows_for_every_night() -> list[Row]:
    """Return rows that hold every allowed triple of settings on up to eight ranks."""
    return covering_array(FACTORS, (*_CONSTRAINTS, _worlds(2, 8)), strength=3, seed=2, candidates=8)


def label(row: Row) -> str:
    """Name a row by its settings."""
    switches = [
        name
        for name in ("sequence_parallel", "overlap", "early_gather", "tied", "qk_norm", "gated")
        if row[name]
    ]
    parts = [
        f"tp{row['tp']}-dp{row['dp']}",
        *([f"pp{row['pp']}-{row['schedule']}-{row['cut']}"] if row["pp"] > 1 else []),
        row["placement"],
        *([f"outer_{row['outer']}"] if row["instances"] > 1 else []),
        f"{row['bucket']}_buckets"
        if row["placement"] != CUT_WEIGHTS
        else f"by_{row['granularity']}",
        f"accumulate{row['accumulation']}",
        "per_token" if row["per_token"] else "mean",
        f"groups{row['groups']}",
        f"v{row['vocabulary']}",
        row["norm"],
        f"bias_{row['bias']}",
        *switches,
        *([row["recompute"]] if row["recompute"] != "none" else []),
        *(["scaled"] if row["loss_scale"] != 1.0 else []),
        *(["late"] if row["link"] == "late" else []),
    ]
    return "-".join(parts + (["dropout"] if row["dropout"] else []))
