# SPDX-License-Identifier: Apache-2.0
"""The rows that every benchmark returns, on a CPU or a GPU, and the table they are printed in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch

MET, MISSED, OPEN = "met", "missed", "open"
#: Decoding is promised this share of the bandwidth of copies, from so many rows on.
DECODE_SHARE, DECODE_ROWS = 0.8, 32
NO_DECODE_TARGET = "without a target, because one row has too few bytes to fill the device"
#: A training step is promised these shares of the data sheet's peak, in rows of 4,096 tokens and in
#: one row of 32,768.
TRAINING_MFU, LONG_TRAINING_MFU = 0.5, 0.45
DECODE_PROMISE = (
    f"{DECODE_SHARE:.0%} of the bandwidth of copies from {DECODE_ROWS} rows on; 1 row is reported"
    f" {NO_DECODE_TARGET}"
).replace("%", " %")


class Peer(TypedDict):
    """The figure of another implementation, and the ratio of ours to it in the same rounds: of
    speeds, where the unit is a time."""

    figure: float
    ratio: float | None


class Row(TypedDict):
    """One measurement.

    Args:
        bench: name of the bench.
        what: the op or quantity with its sizes.
        unit: unit of the figures: "ms", "us", "tokens/s", "GB", or the share of the data sheet's
            peak, "MFU" of FLOP/s and "MBU" of bytes/s; empty where `what` names it.
        ours: our figure; None if it could not be measured.
        peers: peers of the same turns, by name.
        bound: the figure that the device's measured rates allow, or None.
        share: our share of `bound`, at most 1.
        targets: targets, such as "fla >= 1.6" (the ratio to this peer), "share >= 0.85",
            or "ms <= 0.88" or "ours <= 0.88" (our figure).
        note: a remark, or the reason for a missing figure.
    """

    bench: str
    what: str
    unit: str
    ours: float | None
    peers: dict[str, Peer]
    bound: float | None
    share: float | None
    targets: list[str]
    note: str


def compared(
    *,
    bench: str,
    what: str,
    mcore: float | None,
    peer: float | None = None,
    ratio: float | None = None,
    target: str = "",
) -> Row:
    """Return a row with at most one peer, which `what` names.

    Args:
        bench, what: see `Row`.
        mcore: our figure.
        peer: the peer's figure.
        ratio: ours over the peer's, from the same rounds.
        target: bound of the ratio, or without a ratio of our figure, e.g. ">= 1.05".
    """
    subject = "ours" if ratio is None else "peer"
    return Row(
        bench=bench,
        what=what,
        unit="",
        ours=mcore,
        peers={} if peer is None else {"peer": Peer(figure=peer, ratio=ratio)},
        bound=None,
        share=None,
        targets=[f"{subject} {target}"] if target else [],
        note="",
    )


def machine() -> str:
    """Describe this machine's CPU: model, usable cores, bf16 instructions and their speed-up."""
    # Here: tools that only read rows need nothing of `megatron`.
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


def verdict(row: Row, target: str) -> str:
    """Say whether a target of a row is met, missed, or open: nothing was measured for it.

    Raises:
        ValueError: a target of another form.
    """
    subject, sign, bound = target.rsplit(maxsplit=2)
    if sign not in (">=", "<="):
        raise ValueError(f"target {target!r} of {row['what']}: write 'share >= 0.85'")
    if subject == "share":
        figure = row["share"]
    elif subject in ("ours", row["unit"]):
        figure = row["ours"]
    else:
        figure = row["peers"][subject]["ratio"] if subject in row["peers"] else None
    if figure is None:
        return OPEN
    return MET if (figure >= float(bound)) == (sign == ">=") or figure == float(bound) else MISSED


def open_targets(rows: Sequence[Row]) -> list[str]:
    """Return a line for each target that nothing was measured for."""
    return [
        f"{row['what']}: {target}" + (f" ({row['note']})" if row["note"] else "")
        for row in rows
        for target in row["targets"]
        if verdict(row, target) == OPEN
    ]


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table with aligned columns."""
    lines = [["bench", "what", "ours", "peers", "roofline", "share", "targets", "note"]]
    for row in rows:
        peers = ", ".join(_peer(name, peer, row["unit"]) for name, peer in row["peers"].items())
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        targets = ", ".join(f"{target}: {verdict(row, target)}" for target in row["targets"])
        lines.append(
            [row["bench"], row["what"], _figure(row["ours"], row["unit"]), peers]
            + [_figure(row["bound"], row["unit"]), share, targets, row["note"].replace("|", "/")]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def rates_text(rates: Mapping[str, float]) -> str:
    """Return a sentence with the measured rates of the device."""
    phrases = []
    if "copy_bytes_per_second" in rates:
        phrases.append(f"copies {rates['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    if "matmul_flops" in rates:
        phrases.append(f"multiplies {rates['matmul_flops'] / 1e12:,.3g} TFLOP/s")
    return " and ".join(phrases)


def _peer(name: str, peer: Peer, unit: str) -> str:
    ratio = "" if peer["ratio"] is None else f" ({peer['ratio']:.3g} x)"
    return f"{name} {_figure(peer['figure'], unit)}{ratio}"


def _figure(value: float | None, unit: str) -> str:
    """Write a figure with three significant digits or, above 100, as a whole number."""
    if value is None:
        return ""
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()
