# SPDX-License-Identifier: Apache-2.0
"""The rows that every benchmark returns, and the one table they are printed in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch


class Row(TypedDict):
    """One comparison.

    Args:
        bench: the benchmark, e.g. "train".
        what: the quantity with its unit, and the peer, e.g. "fp32 tokens/s / transformers".
        ours: Megatron's figure; None if not measured.
        peer: the peer's figure; None without a peer.
        ratio: ours over peer (of rates and sizes) from the same rounds; None without a peer.
        target: bound of the ratio, or without a ratio of Megatron's figure, e.g. ">= 1.05"; empty
            without a target.
    """

    bench: str
    what: str
    ours: float | None
    peer: float | None
    ratio: float | None
    target: str


def machine() -> str:
    """Describe this machine's CPU: model, usable cores, bf16 instructions and their speed-up."""
    # Here: a process that runs megatron-core imports the rows before anything of `megatron`.
    from megatron.core.ops.backend_choice import cpu_bf16_speedup

    capabilities = torch.cpu.get_capabilities()
    kinds = [k for k in ("avx512_bf16", "amx_bf16") if capabilities.get(k, False)]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cpu_name()}, {cores} cores; {', '.join(kinds) or 'no bf16 instructions'}: bf16 products "
        f"at {cpu_bf16_speedup():.1f} x the speed of fp32; torch {torch.__version__}"
    )


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name as Linux has it."""
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown CPU"


def verdict(row: Row) -> str:
    """Return "yes" or "no" for a row with a figure and a target, else ""."""
    figure = row["ours"] if row["ratio"] is None else row["ratio"]
    if figure is None or not row["target"]:
        return ""
    sign, bound = row["target"].split()
    if sign not in (">=", "<="):
        raise ValueError(f"target {row['target']!r} of {row['what']}: write '>= 1.05' or '<= 1.0'")
    return "yes" if (figure >= float(bound) if sign == ">=" else figure <= float(bound)) else "no"


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table with aligned columns."""
    lines = [["bench", "what", "ours", "peer", "ratio", "target", "met"]]
    for row in rows:
        figures = [_figure(row["ours"]), _figure(row["peer"])]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append([row["bench"], row["what"], *figures, ratio, row["target"], verdict(row)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def _figure(value: float | None) -> str:
    """Write a figure with three significant digits or, above 100, as a whole number."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
