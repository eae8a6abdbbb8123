# SPDX-License-Identifier: Apache-2.0
"""Faults that a compiled kernel must not have, and the record of known faults, which only shrinks.

`record.json` holds, by release of Triton and by kernel/sm_NN, how often each known fault occurs, or
for registers and stack bytes how many. Described kernels and candidates have entries of their own.
Launches of tests and benches share one for each kernel and dtype, with the largest count.

    registers, stack bytes    of a described kernel: beyond tests/unit_tests/core/ops/kernel_budget;
                              with another ptxas than the budget's: a tenth more registers
    stack bytes               of other launches: more than 64
    mma.sync                  in a described kernel or a candidate, where wgmma or tcgen05 is faster
    no launch                 no test of tests/gpu launches a described kernel
    all others                see `ir_checks` and `code_checks`
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tools.gpu_compile.compiler import Outcome
from tools.gpu_compile.launch import CANDIDATE, DESCRIBED, TEST, Launch

RECORD = Path(__file__).with_name("record.json")
BUDGETS = Path(__file__).resolve().parents[2] / "tests/unit_tests/core/ops"
#: What a block may use on both architectures.
SHARED_BYTES = 227 << 10
#: Spills of a few registers cost little.
STACK_BYTES = 64
#: The ptxas of each budget, by release of Triton and architecture, among those of the lane.
BUDGET_ASSEMBLERS: Mapping[tuple[str, int], str] = {
    ("3.6.0", 90): "12.8",
    ("3.7.1", 90): "12.8",
    ("3.7.1", 100): "13.1",
}
Faults = Mapping[str, int]
Budget = Mapping[str, Mapping[str, int]]


def budget_of(triton: str) -> Budget:
    """Return the budget of the described kernels for a release of Triton."""
    for path in BUDGETS.glob("kernel_budget*.json"):
        record = json.loads(path.read_text("utf-8"))
        if record["triton"] == triton:
            return record["kernels"]
    raise FileNotFoundError(
        f"no kernel budget of Triton {triton}: run kernel_budget.py --triton FOLDER"
    )


def entry_of(launch: Launch, architecture: int) -> str:
    """Return the entry of a launch in the record."""
    is_own = launch.source in (DESCRIBED, CANDIDATE)
    name = launch.name if is_own else f"{launch.kernel} {launch.dtype} launches"
    return f"{name}/sm_{architecture}"


def faults_of(
    launch: Launch, architecture: int, outcome: Outcome, *, triton: str, budget: Budget
) -> dict[str, int]:
    """Return the faults of one outcome."""
    if "error" in outcome:
        return {"does not compile": 1}
    faults = dict(outcome["faults"])
    if outcome["shared_bytes"] > SHARED_BYTES:
        faults["shared bytes"] = outcome["shared_bytes"]
    if launch.source in (DESCRIBED, CANDIDATE) and outcome["instructions"]["mma.sync"]:
        faults["mma.sync"] = outcome["instructions"]["mma.sync"]
    if launch.source != DESCRIBED:
        stack = max(stack for _, stack in outcome["needs"].values())
        return faults | ({"stack bytes": stack} if stack > STACK_BYTES else {})
    limit = budget.get(entry_of(launch, architecture))
    if limit is None:
        return faults | {"no budget": 1}
    for release, (registers, stack) in outcome["needs"].items():
        same = BUDGET_ASSEMBLERS.get((triton, architecture)) == release
        allowed = limit["registers"] if same else int(1.1 * limit["registers"]) + 2
        if registers > allowed:
            faults[f"registers by ptxas {release}"] = registers
        if stack > limit["stack_bytes"]:
            faults[f"stack bytes by ptxas {release}"] = stack
    return faults


def untested(launches: Iterable[Launch]) -> dict[str, dict[str, int]]:
    """Return a fault for each described kernel that no test of tests/gpu launches, by entry."""
    kernels: dict[str, set[str]] = {DESCRIBED: set(), TEST: set()}
    for one_launch in launches:
        kernels.setdefault(one_launch.source, set()).add(one_launch.kernel)
    missing = sorted(kernels[DESCRIBED] - kernels[TEST])
    return {f"{kernel} in tests/gpu": {"no launch": 1} for kernel in missing}


def merged(counts: Mapping[str, int], new_counts: Mapping[str, int]) -> dict[str, int]:
    """Return the larger count of each fault."""
    return {
        name: max(counts.get(name, 0), new_counts.get(name, 0)) for name in {**counts, **new_counts}
    }


def differences(
    new_faults: Mapping[str, Faults], record: Mapping[str, Faults], *, whole: bool
) -> tuple[list[str], list[str]]:
    """Compare faults with the record of the same release of Triton.

    Args:
        new_faults: faults by entry, an empty mapping for an entry without any.
        record: the known faults by entry.
        whole: everything was compiled: an entry of the record that is not among `new_faults` is
            stale.

    Returns:
        (faults that are new or more than recorded, faults that are fewer or gone).
    """
    new, gone = [], []
    for entry, faults in new_faults.items():
        recorded = record.get(entry, {})
        for name in sorted({**faults, **recorded}):
            count, limit = faults.get(name, 0), recorded.get(name, 0)
            if count > limit:
                new.append(f"{entry}: {name}: {count}, {limit} on record")
            elif count < limit and (whole or not entry.split("/")[0].endswith(" launches")):
                gone.append(f"{entry}: {name}: {count}, {limit} on record")
    if whole:
        gone += [f"{entry}: is on record and not launched" for entry in record.keys() - new_faults]
    return new, sorted(gone)


def updated(
    new_faults: Mapping[str, Faults],
    record: Mapping[str, Faults],
    *,
    whole: bool,
    raising: Collection[str] | None = (),
) -> dict[str, dict[str, int]]:
    """Return the new record of one release of Triton.

    Args:
        new_faults: faults by entry.
        record: the old record; empty begins one.
        whole: drop entries that are not among `new_faults`.
        raising: kernels or entries whose faults may be new or more; None allows all.

    Raises:
        ValueError: a fault that is new or more and not in `raising`.
    """
    new, _ = differences(new_faults, record, whole=whole)
    refused = [
        line for line in new if raising is not None and not _named(line.split(": ")[0], raising)
    ]
    if record and refused:
        raise ValueError(
            "the record only shrinks; fix these, or name each with --raise and say why in the"
            f" commit: {'; '.join(refused)}"
        )
    entries = {} if whole else {k: dict(v) for k, v in record.items() if k not in new_faults}
    for entry, faults in new_faults.items():
        if not whole and entry.split("/")[0].endswith(" launches"):
            faults = merged(faults, record.get(entry, {}))
        if faults:
            entries[entry] = dict(sorted(faults.items()))
    return dict(sorted(entries.items()))


def _named(entry: str, names: Collection[str]) -> bool:
    """Tell whether an entry, its name without the architecture or its kernel is named."""
    return not {entry, entry.split("/")[0], entry.split("/")[0].split(" ")[0]}.isdisjoint(names)


def read_record(path: Path = RECORD) -> dict[str, dict[str, dict[str, int]]]:
    """Return the record by release of Triton and entry."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def write_record(record: Mapping[str, Mapping[str, Faults]], path: Path = RECORD) -> None:
    """Write the record, one line an entry."""
    paragraphs = []
    for triton, entries in sorted(record.items()):
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items()]
        body = ",\n".join(lines)
        paragraphs.append(f" {json.dumps(triton)}: {{\n{body}\n }}")
    path.write_text("{\n" + ",\n".join(paragraphs) + "\n}\n", encoding="utf-8")


def tabulated(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
