# SPDX-License-Identifier: Apache-2.0
"""Comparison of measured steps with the record: no figure may grow.

`record.json` has for each step its launches, copies, fills, waits of the host and peak of memory,
as `make gpu-null NULL_FLAGS="--only steps --record"` writes it. The host's milliseconds are only
informative: they depend on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("record.json")
Steps = Mapping[str, Mapping[str, Any]]

#: Each must be zero, whatever is on record.
FAULTS = ("refused", "outside_capture", "unsupported")
#: Read, not checked.
UNCHECKED = ("host_cpu_ms", "weights", "tokens")
#: A peak may grow by this share: an allocator's rounding.
PEAK_SHARE = 0.005
#: (words of a name, count, the most of it in a step), whatever is on record. Training waits for the
#: gradient norm and the loss, decoding for the chosen tokens.
BARS = (
    (("training", "llama"), "waits", 2),
    (("training", "llama"), "torch_launches", 700),
    (("training", "hybrid"), "waits", 2),
    (("training", "latent"), "waits", 2),
    (("training", "of 64 experts"), "waits", 2),
    (("training", "experts on 4 ranks", " capacity 1.25"), "waits", 2),
    # One for each of four layers in addition.
    (("training", "experts on 4 ranks", "no capacity"), "waits", 6),
    # For the sums; with a capacity for whether all tokens had room, without one for each layer.
    (("evaluation", " capacity 1.25"), "waits", 2),
    (("evaluation", "no capacity"), "waits", 5),
    (("decode",), "waits", 1),
    (("decode", "graphs"), "torch_launches", 12),
    (("decode", "graphs"), "triton_launches", 4),
)


def read(path: Path = RECORD) -> dict[str, dict[str, Any]]:
    """Return the steps on record."""
    return json.loads(path.read_text(encoding="utf-8"))["steps"]


def write(steps: Steps, *, versions: Mapping[str, str], path: Path = RECORD) -> None:
    """Put measured steps on record."""
    content = {"versions": dict(versions), "steps": {name: dict(steps[name]) for name in steps}}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def problems(measured: Steps, recorded: Steps, *, complete: bool = True) -> list[str]:
    """Return a line for each problem of the measured steps.

    Args:
        measured, recorded: figures by name of the step.
        complete: every step was to be measured.
    """
    lines = [f"{name}: not on record: add --record" for name in measured.keys() - recorded.keys()]
    if complete:
        lines += [f"{name}: not measured" for name in recorded.keys() - measured.keys()]
    for name, counts in measured.items():
        lines += [
            f"{name}: {fault}: {counts[fault]}, must be 0" for fault in FAULTS if counts[fault]
        ]
        lines += [
            f"{name}: {key}: {counts[key]:g} a step, at most {limit}"
            for words, key, limit in BARS
            if all(word in name for word in words) and counts.get(key, 0) > limit
        ]
        for key, bound in recorded.get(name, {}).items():
            if key in UNCHECKED or key in FAULTS:
                continue
            allowed = bound * (1 + PEAK_SHARE) if key == "peak_bytes" else bound
            if counts[key] > allowed:
                lines.append(f"{name}: {key}: {counts[key]:,} a step, {bound:,} on record")
    return sorted(lines)


def improvements(measured: Steps, recorded: Steps) -> list[str]:
    """Return a line for each figure that is below the record."""
    return [
        f"{name}: {key}: {counts[key]:,} a step, {recorded[name][key]:,} on record"
        for name, counts in measured.items()
        for key in counts
        if key not in UNCHECKED
        and key in recorded.get(name, {})
        and counts[key] < recorded[name][key] * (1 - PEAK_SHARE)
    ]
