# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a run, kept twice: numbers as an event of kind `fault` in metrics.jsonl, which
goes back with a resume, and a line in SAVE/faults.jsonl, which names machines and stays.

A line of faults.jsonl is one JSON object:

    time        when, UTC
    iteration   the step, counted from 1
    kind        nan, inf_norm, spike, determinism; replicas
    verdict     transient, reproduced, persistent, unchecked, undecided
    ranks       {rank: machine} where it showed, by rank
    values      of each computation, as decimal numbers or "nan", "inf", "-inf"
    bits        the same numbers, exact: Python's float.hex
    tensors     replicas: what differs
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.untrusted_files import write_to

#: In the save folder.
FILE = "faults.jsonl"


@dataclass(frozen=True)
class FaultRecord:
    """One fault.

    Args:
        iteration: the step, counted from 1.
        kind, verdict: see above.
        hosts: the machine of every rank where it showed.
        values: what came out, once per computation.
        tensors: what differs, of replicas.
        numbers: more of it, for metrics.jsonl alone.
    """

    iteration: int
    kind: str
    verdict: str
    hosts: Mapping[int, str]
    values: Sequence[float] = ()
    tensors: Sequence[str] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


class FaultLog:
    """Keeps faults.

    Args:
        save: the folder; None keeps no lines.
        record: writes numbers of an event, by kind.
        warn: shows one line, if a fault cannot be kept.
    """

    def __init__(
        self,
        save: str | None,
        *,
        record: Callable[[str, int, dict[str, float]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._path = None if save is None else Path(save, FILE)
        self._record, self._warn = record, warn

    def event(self, iteration: int, numbers: dict[str, float]) -> None:
        """Keep the numbers of what was done about faults."""
        self._record("fault", iteration, numbers)

    def add(self, fault: FaultRecord) -> None:
        """Keep one; a full disk ends no run."""
        first = float(min(fault.hosts, default=-1))
        event = {fault.kind: 1.0, fault.verdict: 1.0, "first_rank": first, **fault.numbers}
        self._record("fault", fault.iteration, event)
        if self._path is None:
            return
        try:
            with write_to(self._path, "a") as file:
                print(_line(fault), file=file)
        except OSError as error:
            self._warn(f"a fault cannot be noted in {self._path}: {error}")


def _line(fault: FaultRecord) -> str:
    now = datetime.datetime.now(datetime.UTC)
    values = [value if math.isfinite(value) else str(value) for value in fault.values]
    found: dict[str, object] = {
        "time": now.isoformat(timespec="seconds"),
        "iteration": fault.iteration,
        "kind": fault.kind,
        "verdict": fault.verdict,
        "ranks": {str(rank): host for rank, host in fault.hosts.items()},
        "values": values,
        "bits": [value.hex() for value in fault.values],
    }
    if fault.tensors:
        found["tensors"] = list(fault.tensors)
    return json.dumps(found)
