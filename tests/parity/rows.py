# SPDX-License-Identifier: Apache-2.0
"""The rows of the parity tests: a covering array over all layouts and model settings.

A new axis or feature adds a factor here and is then tested together with all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from megatron.core.weight_sharding import STRATEGIES
from tests.support.covering_array import Constraint, Row, covering_array

FACTORS: Mapping[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "gtp": (1, 2, 3, 4),
    "dp": (1, 2, 4),
    "pp": (1, 2, 4),
    "cp": (1, 2, 4),
    "instances": (1, 2),  # size of the outer axis of hybrid sharding
    "ep": (1, 2, 4),
    "etp": (1, 2, 4),
    "egtp": (1, 2),
    "experts": (None, "softmax", "sigmoid"),  # in the last layer and in MTP layers
    "schedule": ("1f1b", "interleaved", "zb-h1"),  # interleaved has two chunks per stage
    "cut": ("even", "uneven"),  # of the blocks into stages
    "engine": ("p2p", "all_gather", "a2a"),
    "order": ("zigzag", "contiguous"),
    "documents": ("whole", "packed", "padded"),
    "window": (None, 5),
    "sinks": (False, True),
    "second_attention": (None, "window", "no positions"),  # of the first attention block
    "sequence_parallel": (False, True),
    "placement": STRATEGIES,
    "outer": ("no_shard", "optim"),
    "granularity": ("unit", "weight"),
    "bucket": ("small", "large"),
    "reduce_scatter": ("microbatch", "step"),  # of gradients over gtp
    "wire": ("bf16", "fp8", "mxfp8", "nvfp4"),  # gather format of weights over gtp
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
    "norm_placement": ("pre", "both", "post"),
    "qk_norm": (False, True, "projection"),
    "bias": ("none", "qkv", "all"),
    "gated": (True, False),
    "gate": ("silu", "clamped"),
    "multipliers": (False, True),
    "softcaps": (False, True),  # of attention logits and of logits
    "dropout": (0.0, 0.1),
    "recompute": ("none", "full", "selective"),
    "dispatcher": ("alltoall", "allgather"),
    "capacity": (None, "probs", "position"),
    "shared": ("none", "plain", "gated"),
    "expert_bias": (False, True),  # of experts and router
    "attention": ("grouped", "latent"),
    "positions": ("rope", "learned"),
    "rotary": ("plain", "yarn", "query_scale"),
    "predictions": (0, 1, 2),  # depth of multi-token prediction
    "attention_gate": (False, True),
    "mixer": (None, "delta", "mamba", "short_conv"),  # of the first layer and of MTP layers
    "parallel": (False, True),  # attention and MLP or experts of each layer
    "linear_mode": ("headwise", "segments"),
    "mamba_groups": (8, 1, 2),
    "norm_groups": (None, 1, 8),
}

#: The base of other rows: the first setting of most factors.
PLAIN_ROW: Mapping[str, Any] = {
    **{name: settings[0] for name, settings in FACTORS.items()},
    "tp": 2,
    "groups": 4,
    "bucket": "large",
}

CUT_WEIGHTS = "optim_grads_params"

#: Settings of a row without experts, and of a row with latent attention.
EXPERTS_OFF = {
    "ep": 1,
    "etp": 1,
    "egtp": 1,
    "dispatcher": "alltoall",
    "capacity": None,
    "shared": "none",
    "expert_bias": False,
}
LATENT_SETTINGS = {
    "groups": 8,
    "qk_norm": False,
    "window": None,
    "sinks": False,
    "second_attention": None,
    "attention_gate": False,
    "positions": "rope",
}

#: 1-D blocks of scales.
RUNS = {"scale_blocks": "1d"}

#: Settings of a row without a linear recurrence, and of a row without Mamba-2.
RECURRENCE_OFF = {"linear_mode": "headwise"}
MAMBA_OFF = {"mamba_groups": 8, "norm_groups": None}


def _only_with(
    factor: str, free: Callable[[Any], bool], otherwise: Mapping[str, Any]
) -> list[Constraint]:
    """Fix the settings `otherwise` unless the value of `factor` is `free`."""
    return [
        Constraint((factor, name), lambda value, setting, off=off: free(value) or setting == off)
        for name, off in otherwise.items()
    ]


#: Only Mamba-2 has groups.
MAMBA_ALONE = _only_with("mixer", lambda mixer: mixer == "mamba", MAMBA_OFF)

#: Parallel blocks are attention and an MLP or experts, and not in MTP layers.
PARALLEL = (
    Constraint(("parallel", "mixer"), lambda parallel, mixer: not parallel or mixer is None),
    Constraint(("parallel", "attention"), lambda p, attention: not p or attention == "grouped"),
    Constraint(("parallel", "predictions"), lambda parallel, depths: not parallel or depths == 0),
)

#: Without rotation, a key bias shifts all scores of a query equally: without a sink its gradient is
#: exactly zero, so there is nothing to compare.
LEARNED_POSITIONS = (
    Constraint(
        ("positions", "bias"), lambda positions, bias: positions == "rope" or bias == "none"
    ),
    Constraint(
        ("positions", "norm", "qk_norm"),
        lambda positions, norm, qk: positions == "rope" or not qk or norm == "RMSNorm",
    ),
    Constraint(
        ("positions", "rotary"), lambda positions, rotary: positions == "rope" or rotary == "plain"
    ),
    Constraint(
        ("positions", "second_attention"),
        lambda positions, second: positions == "rope" or second != "no positions",
    ),
    Constraint(
        ("second_attention", "bias"),
        lambda second, bias: second != "no positions" or bias == "none",
    ),
    Constraint(
        ("second_attention", "norm", "qk_norm"),
        lambda second, norm, qk: second != "no positions" or not qk or norm == "RMSNorm",
    ),
)

#: Settings of a row without gates.
GATE_OFF = {"gate": "silu"}

#: Only gated MLPs have a gate.
GATES_ALONE = _only_with("gated", lambda gated: gated, GATE_OFF)

#: Norms of whole projections have no means to subtract.
QUERY_KEY_NORMS = (
    Constraint(("norm", "qk_norm"), lambda norm, qk: norm == "RMSNorm" or qk != "projection"),
)

#: A norm of a recurrent mixer's output amplifies rounding.
NORM_PLACEMENTS = (
    Constraint(
        ("norm_placement", "mixer"), lambda placement, mixer: placement == "pre" or mixer is None
    ),
)

_CONSTRAINTS = (
    *GATES_ALONE,
    *QUERY_KEY_NORMS,
    Constraint(("qk_norm", "wire"), lambda qk, wire: qk != "projection" or wire == "bf16"),
    *NORM_PLACEMENTS,
    # Gradients of norms of outputs with means nearly cancel; norms of outputs of encoded weights
    # amplify the rounding of the encoding.
    Constraint(
        ("norm_placement", "norm"), lambda placement, norm: placement == "pre" or norm == "RMSNorm"
    ),
    Constraint(
        ("norm_placement", "wire"), lambda placement, wire: placement == "pre" or wire == "bf16"
    ),
    Constraint(("tp", "sequence_parallel"), lambda tp, sp: tp > 1 or not sp),
    Constraint(("pp", "schedule"), lambda pp, schedule: pp > 1 or schedule == "1f1b"),
    Constraint(("pp", "cut"), lambda pp, cut: pp > 1 or cut == "even"),
    Constraint(("cp", "engine"), lambda cp, engine: cp > 1 or engine == "p2p"),
    Constraint(("cp", "order"), lambda cp, order: cp > 1 or order == "zigzag"),
    Constraint(("dp", "instances"), lambda dp, instances: instances == 1 or dp == 4),
    Constraint(("placement", "instances"), lambda p, instances: p != "no_shard" or instances == 1),
    Constraint(
        ("placement", "instances", "outer"),
        lambda p, instances, outer: outer == "no_shard" or (p, instances) == (CUT_WEIGHTS, 2),
    ),
    Constraint(("placement", "granularity"), lambda p, g: g == "unit" or p == CUT_WEIGHTS),
    Constraint(("placement", "bucket"), lambda p, bucket: bucket == "large" or p != CUT_WEIGHTS),
    Constraint(
        ("gtp", "egtp", "placement", "reduce_scatter"),
        lambda gtp, egtp, placement, per: (
            per == "microbatch" or (gtp * egtp > 1 and placement in ("no_shard", "optim"))
        ),
    ),
    # Scales depend on a tp rank's shard, so they match a single process only without tp.
    Constraint(
        ("tp", "gtp", "egtp", "experts", "placement", "wire"),
        lambda tp, gtp, egtp, experts, placement, wire: (
            wire == "bf16"
            or (tp == egtp == 1 < gtp and experts is None and placement != CUT_WEIGHTS)
        ),
    ),
    # Its matrices are larger than the others: in most, some element is between two codes.
    Constraint(("mixer", "wire"), lambda mixer, wire: mixer != "short_conv" or wire == "bf16"),
    Constraint(("placement", "early_gather"), lambda p, early: p != "no_shard" or not early),
    Constraint(
        ("tp", "gtp", "dp", "cp", "etp", "ep", "egtp", "instances"),
        lambda tp, gtp, dp, cp, etp, ep, egtp, instances: (
            tp * gtp * dp * cp % (etp * ep * egtp * instances) == 0
        ),
    ),
    Constraint(("gtp", "instances"), lambda gtp, instances: gtp == 1 or instances == 1),
    Constraint(("egtp", "instances"), lambda egtp, instances: egtp == 1 or instances == 1),
    *_only_with("experts", lambda experts: experts is not None, EXPERTS_OFF),
    # Eight microbatches are for pipelines; among many tokens, some route has a tiny margin.
    Constraint(
        ("pp", "experts", "accumulation"),
        lambda pp, experts, n: n < 8 or (pp > 1 and experts is None),
    ),
    *_only_with("attention", lambda attention: attention == "grouped", LATENT_SETTINGS),
    *LEARNED_POSITIONS,
    Constraint(("positions", "predictions"), lambda p, depths: p == "rope" or depths == 0),
    Constraint(("attention", "bias"), lambda a, bias: a == "grouped" or bias != "qkv"),
    *_only_with("mixer", lambda mixer: mixer in ("delta", "mamba"), RECURRENCE_OFF),
    *MAMBA_ALONE,
    *PARALLEL,
    Constraint(("cp", "linear_mode"), lambda cp, mode: cp > 1 or mode == "headwise"),
    # Headwise splits a rank's heads again: four key heads allow at most four ranks.
    Constraint(
        ("mixer", "tp", "cp", "linear_mode"),
        lambda mixer, tp, cp, mode: (
            mode == "segments" or tp * cp <= {"delta": 4, "mamba": 8}.get(mixer, math.inf)
        ),
    ),
)


def _worlds(low: int, high: int) -> Constraint:
    return Constraint(
        ("tp", "gtp", "dp", "pp", "cp"),
        lambda tp, gtp, dp, pp, cp: low <= tp * gtp * dp * pp * cp <= high,
    )


def world_of(row: Row) -> int:
    """Return the number of ranks of a row."""
    return math.prod(row[axis] for axis in ("tp", "gtp", "dp", "pp", "cp"))


def params(rows: Iterable[Row]) -> list[Any]:
    """Return rows as test cases, marked with the number of GPUs."""
    return [pytest.param(r, id=label(r), marks=pytest.mark.gpus(world_of(r))) for r in rows]


def single_rank_rows() -> list[Row]:
    """Return single-rank rows, which compare devices."""
    single = {"tp": 1, "dp": 1}
    return [
        row_with(**single, accumulation=3, tied=True, groups=2, qk_norm=True, bias="all"),
        row_with(**single, norm="LayerNorm", gated=False, recompute="selective", window=5),
        row_with(**single, mixer="delta", groups=1),
        row_with(**single, mixer="mamba", mamba_groups=1, documents="packed"),
        row_with(**single, experts="softmax", egtp=1, recompute="full"),
        row_with(**single, attention="latent", groups=8, predictions=1),
    ]


def shards_over_gtp(row: Row) -> bool:
    """Return whether some weights of a row are sharded over gtp or egtp alone."""
    return row["gtp"] * row["egtp"] > 1 and row["placement"] != CUT_WEIGHTS


def seconds_of(row: Row) -> float:
    """Return the approximate seconds of a row on two cores. The seeds of arrays have the fewest
    seconds of a hundred seeds."""
    return world_of(row) * math.sqrt(row["accumulation"]) / 2


def rows_for_make_test() -> list[Row]:
    """Return all allowed pairs on two and four ranks, including all pairs on pp 2 x dp 2 and on
    cp 2, and five rows of eight ranks; with two wire formats (see `rows_of_formats`)."""
    # The rows of stages and of sequences already cover most of the pairs.
    rows = covering_array(
        {**FACTORS, "wire": ("bf16", "mxfp8")},
        (*_CONSTRAINTS, _worlds(2, 4)),
        seed=42,
        candidates=40,
        start=rows_of_stages_and_dp() + rows_of_sequences(),
        cost=seconds_of,
    )
    return rows + rows_of_eight()


def rows_of_stages_and_dp() -> list[Row]:
    """Return all allowed pairs on pp 2 x dp 2: every schedule runs the collectives of every
    strategy, which rows with dp 1 do not."""
    square = {**FACTORS, "tp": (1,), "gtp": (1,), "dp": (2,), "pp": (2,), "cp": (1,)}
    square["egtp"] = (1,)
    square |= {name: (setting,) for name, setting in MAMBA_OFF.items()}
    return covering_array(square, _CONSTRAINTS, seed=0, candidates=40, cost=seconds_of)


def rows_of_sequences() -> list[Row]:
    """Return all allowed pairs on cp 2."""
    shared = {**FACTORS, "tp": (1,), "gtp": (1,), "dp": (1,), "pp": (1,), "cp": (2,)}
    shared["egtp"] = (1,)
    return covering_array(shared, _CONSTRAINTS, seed=11, candidates=40, cost=seconds_of)


def rows_of_formats() -> list[Row]:
    """Return the wire formats with every strategy and shape of gtp."""
    layouts = (
        {"gtp": 2, "dp": 2, "bucket": "small", "link": "late", "tied": True, "bias": "all"},
        {"gtp": 3, "dp": 1, "recompute": "full", "mixer": "mamba"},
        {"gtp": 2, "dp": 1, "pp": 2, "schedule": "zb-h1", "predictions": 1, "vocabulary": 9},
    )
    strategies = ("optim", "optim_grads", "no_shard")
    formats = ({"wire": "fp8"}, {"wire": "nvfp4"}, {"wire": "mxfp8"}, {"wire": "nvfp4", **RUNS})
    rows = [
        row_with(tp=1, placement=strategies[(i + j) % 3], accumulation=3, **form, **layout)
        for i, form in enumerate(formats)
        for j, layout in enumerate(layouts)
    ]
    # mxfp8 scales are powers of two: directions differ in elements far below their neighbours.
    rows.append(row_with(tp=1, gtp=2, wire="mxfp8", **RUNS))
    rows.append(row_with(tp=1, gtp=2, wire="nvfp4", experts="softmax", egtp=2, **RUNS))
    return rows


def row_with(**changes: Any) -> Row:
    """Return the plain row with some settings changed."""
    return {**PLAIN_ROW, **changes}


def rows_of_eight() -> list[Row]:
    """Return rows of eight ranks: two that differ in every setting except stages, sequences and
    experts, and three with three axes, one of them with experts."""
    tensor_row = row_with(
        tp=4,
        dp=2,
        sequence_parallel=True,
        placement="optim",
        bucket="small",
        early_gather=True,
        accumulation=3,
        loss_scale=1024.0,
        tied=True,
        groups=2,
        qk_norm=True,
        dropout=0.1,
        recompute="full",
        attention_gate=True,
    )
    deep = row_with(
        tp=2,
        dp=4,
        placement=CUT_WEIGHTS,
        instances=2,
        outer="optim",
        granularity="weight",
        overlap=False,
        link="late",
        per_token=True,
        vocabulary=9,
        groups=1,
        norm="LayerNorm",
        bias="all",
        gated=False,
        recompute="selective",
    )
    staged = {**deep, "dp": 2, "pp": 2, "schedule": "zb-h1", "cut": "uneven", "accumulation": 3}
    staged |= {"instances": 1, "outer": "no_shard", "tied": True, "sequence_parallel": True}
    long = {**staged, "dp": 1, "cp": 2, "documents": "packed", "window": 5, "sinks": True}
    long |= {"placement": "optim_grads", "granularity": "unit", "mixer": "delta"}
    long |= {"linear_mode": "segments"}
    routed = {**staged, "experts": "sigmoid", "ep": 2, "etp": 1, "shared": "gated", "gated": True}
    routed |= {"capacity": "probs", "attention": "latent", "groups": 8, "predictions": 1}
    routed |= {"mixer": "mamba", "mamba_groups": 1, "norm_groups": 1}
    return [tensor_row, deep, staged, long, routed]


def rows_for_nightly() -> list[Row]:
    """Return rows that cover every allowed triple of settings on up to eight ranks."""
    return covering_array(FACTORS, (*_CONSTRAINTS, _worlds(2, 8)), strength=3, seed=2, candidates=8)


def label(row: Row) -> str:
    """Name a row by its settings."""
    switches = [
        name
        for name in (
            "sequence_parallel",
            "overlap",
            "early_gather",
            "tied",
            "sinks",
            "gated",
            "attention_gate",
            "expert_bias",
            "multipliers",
            "parallel",
            "softcaps",
        )
        if row[name]
    ]
    labels = [
        f"tp{row['tp']}-dp{row['dp']}",
        *([f"gtp{row['gtp']}"] if row["gtp"] > 1 else []),
        *([f"pp{row['pp']}-{row['schedule']}-{row['cut']}"] if row["pp"] > 1 else []),
        *([f"cp{row['cp']}-{row['engine']}-{row['order']}"] if row["cp"] > 1 else []),
        *([row["documents"]] if row["documents"] != "whole" else []),
        *([f"window{row['window']}"] if row["window"] else []),
        *([f"second_{row['second_attention']}"] if row["second_attention"] else []),
        row["placement"],
        *([f"outer_{row['outer']}"] if row["instances"] > 1 else []),
        f"{row['bucket']}_buckets"
        if row["placement"] != CUT_WEIGHTS
        else f"by_{row['granularity']}",
        *([row["wire"]] if row["wire"] != "bf16" else []),
        *([row["scale_blocks"]] if "scale_blocks" in row else []),
        *(["reduce_once"] if row["reduce_scatter"] == "step" else []),
        f"accumulate{row['accumulation']}",
        "per_token" if row["per_token"] else "mean",
        f"groups{row['groups']}",
        f"v{row['vocabulary']}",
        row["norm"],
        *([f"norm_{row['norm_placement']}"] if row["norm_placement"] != "pre" else []),
        f"bias_{row['bias']}",
        *([row["gate"]] if row["gate"] != "silu" else []),
        *(["qk_norm"] if row["qk_norm"] else []),
        *(["of_projection"] if row["qk_norm"] == "projection" else []),
        *switches,
        *([row["recompute"]] if row["recompute"] != "none" else []),
        *(["scaled"] if row["loss_scale"] != 1.0 else []),
        *(["late"] if row["link"] == "late" else []),
        *([_label_of_experts(row)] if row["experts"] else []),
        *(["latent"] if row["attention"] == "latent" else []),
        *(["learned_positions"] if row["positions"] == "learned" else []),
        *([row["rotary"]] if row["rotary"] != "plain" else []),
        *([f"predict{row['predictions']}"] if row["predictions"] else []),
        *([_label_of_mixer(row)] if row["mixer"] else []),
    ]
    return "-".join(labels + (["dropout"] if row["dropout"] else []))


def _label_of_experts(row: Row) -> str:
    capacity = "dropless" if row["capacity"] is None else f"keep_{row['capacity']}"
    where = f"ep{row['ep']}-etp{row['etp']}-{row['dispatcher']}"
    where += f"-egtp{row['egtp']}" if row["egtp"] > 1 else ""
    return f"{row['experts']}_experts-{where}-{capacity}-shared_{row['shared']}"


def _label_of_mixer(row: Row) -> str:
    how = [row["linear_mode"]] if row["cp"] > 1 and row["mixer"] != "short_conv" else []
    if row["mixer"] == "mamba":
        norm = [] if row["norm_groups"] is None else [f"norm_groups{row['norm_groups']}"]
        how += [f"mamba_groups{row['mamba_groups']}", *norm]
    return "-".join([row["mixer"], *how])
