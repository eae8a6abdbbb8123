# SPDX-License-Identifier: Apache-2.0
"""A bench on a CPU or a GPU: independent builders of cases, one after another, in limited time.

Results are written to disk after every case, so a bench that is stopped loses only the current
case.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
import sys
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from tools.bench.cases import MCORE, Builder, Case
from tools.bench.rehearsal import be_interpreted
from tools.bench.table import Peer, Row, format_table, machine, verdict
from tools.bench.timing import Stopwatch, measured_rates, ratio_of

Size = TypeVar("Size")
#: Rounds and untimed warm-up rounds: in a rehearsal, on a GPU, on a CPU.
ROUNDS = {"rehearsal": (1, 1), "cuda": (10, 3), "cpu": (15, 2)}
QUICK_ROUNDS = 5


class Bench:
    """What the cases of a bench share: device, dtype, stopwatch and rows.

    Args:
        name: of the bench, in rows.
        options: of the command line, see `options_of`.
        dtype: of inputs; None is bf16 on a GPU and fp32 on a CPU.
        on_cpu: use the CPU even if there is a GPU.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        *,
        dtype: torch.dtype | None = None,
        on_cpu: bool = False,
    ) -> None:
        self.name, self.rehearse, self.quick = name, options.rehearse, options.quick
        self.results_path = None if options.part is None else Path(options.part)
        on_gpu = torch.cuda.is_available() and not (self.rehearse or on_cpu)
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        #: Whether full sizes run on a CPU, without the interpreter.
        self.is_cpu = not on_gpu and not self.rehearse
        self.end = time.monotonic() + options.seconds
        rounds, warmup = ROUNDS["rehearsal" if self.rehearse else self.device.type]
        if self.is_cpu and self.quick:
            rounds = QUICK_ROUNDS
        self.watch = Stopwatch(self.device, rounds=rounds, warmup=warmup)
        #: The `implementation` of our ops that a case times: on a CPU their default.
        self.implementation = "triton" if on_gpu or self.rehearse else None
        self.rates: dict[str, float] = {}
        self.rows: list[Row] = []
        self.problems: dict[str, str] = {}
        self.kernels: dict[str, list[dict]] = {}

    def sized(self, gpu: Size, rehearsal: Size, *, cpu: Size | None = None) -> Size:
        """Return the size of a case on this device.

        Args:
            gpu: on a GPU.
            rehearsal: tiny, for the interpreter.
            cpu: on a CPU; a case without one is not registered for CPUs.
        """
        if self.rehearse:
            return rehearsal
        return gpu if self.watch.on_gpu or cpu is None else cpu

    def drawn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a normal random tensor on the device, in the bench's dtype."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def leaf(self, *shape: int) -> torch.Tensor:
        """Return such a tensor that takes a gradient."""
        return self.drawn(*shape).requires_grad_()

    def race(self, case: Case) -> None:
        """Time a case and its peers in turns, and add its row."""
        timings = self.watch.race({MCORE: case.mcore, **case.peers})
        mcore_seconds = timings.pop(MCORE)
        factor = {"ms": 1e3, "us": 1e6}[case.unit] / case.count
        mcore = statistics.median(mcore_seconds)
        peers = {
            name: Peer(
                figure=factor * statistics.median(seconds), ratio=ratio_of(mcore_seconds, seconds)
            )
            for name, seconds in timings.items()
        }
        bounds = []
        if case.flops:
            bounds.append(case.flops / self.rates["matmul_flops"])
        if case.moved_bytes:
            bounds.append(case.moved_bytes / self.rates["copy_bytes_per_second"])
        self.add(
            case.name,
            factor * mcore,
            unit=case.unit,
            peers=peers,
            bound=factor * max(bounds) if bounds else None,
            share=max(bounds) / mcore if bounds else None,
            targets=case.targets,
            note=case.note,
        )

    def add(
        self,
        what: str,
        figure: float | None,
        *,
        unit: str,
        peers: Mapping[str, Peer] | None = None,
        bound: float | None = None,
        share: float | None = None,
        targets: Sequence[str] = (),
        note: str = "",
    ) -> None:
        """Add a row."""
        row = Row(
            bench=self.name,
            what=what,
            unit=unit,
            ours=figure,
            peers=dict(peers or {}),
            bound=bound,
            share=share,
            targets=list(targets),
            note=note,
        )
        if self.rehearse:  # whether targets can be judged is all that it shows
            for target in row["targets"]:
                verdict(row, target)
            row["targets"], row["note"] = [], "rehearsed"
        self.rows.append(row)

    def run(self, cases: Iterable[tuple[str, Builder | Callable[[Bench], None]]]) -> int:
        """Measure the cases, print the table, and return the exit code."""
        self.measure(cases)
        print(format_table(self.rows))
        for name, problem in self.problems.items():
            print(f"{self.name}: {name}: {problem}")
        print(f"{len(self.rows)} rows, {len(self.problems)} problems")
        return 1 if self.problems else 0

    def measure(self, cases: Iterable[tuple[str, Builder | Callable[[Bench], None]]]) -> None:
        """Measure the cases: collect their rows and problems, and write them to a file if asked.

        Args:
            cases: by name, builders of cases, or functions that add their rows themselves.
        """
        self.rates = measured_rates(self.watch, self.dtype)
        self._free()
        for name, case in cases:
            if time.monotonic() >= self.end:
                self.problems[name] = "not started: no time left"
                continue
            print(f"bench: {self.name}: {name}", file=sys.stderr, flush=True)
            try:
                for timed_case in case(self) or ():
                    self.race(timed_case)
            except Exception as problem:
                traceback.print_exc()
                lines = str(problem).strip().splitlines() or [""]
                self.problems[name] = f"{type(problem).__name__}: {lines[0]}"
            self.save()
            if not self._device_answers():
                self.problems["device"] = f"refuses all work after {name}: no case follows"
                break
            self._free()
        self.save()

    def _device_answers(self) -> bool:
        """Whether the device still works: an illegal access makes it refuse all that follows, also
        calls of the allocator, whichever library has seen it first."""
        try:
            self.watch.wait()
        except RuntimeError:
            return False
        return True

    def _free(self) -> None:
        """Free the memory of finished cases: workers need it."""
        gc.collect()
        if self.watch.on_gpu:
            torch.cuda.empty_cache()

    def save(self) -> None:
        """Write the results so far."""
        if self.results_path is None:
            return
        results = {"rates": self.rates, "rows": self.rows, "problems": self.problems}
        text = json.dumps(results | {"kernels": self.kernels})
        self.results_path.write_text(text, encoding="utf-8")


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the options that all benches on a GPU have; a rehearsal turns the interpreter on."""
    parser.add_argument("--part", default=None, help="file for what was measured, as JSON")
    parser.add_argument("--seconds", type=float, default=600.0, help="no case starts after these")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU, interpreted")
    parser.add_argument("--quick", action="store_true", help="few rounds; of a rehearsal one op")
    options = parser.parse_args()
    if options.rehearse:
        be_interpreted()
    return options


def no_device(options: argparse.Namespace, name: str) -> bool:
    """Say that there is no GPU, where one is needed."""
    if options.rehearse or torch.cuda.is_available():
        return False
    print(f"{name}: torch sees no GPU here: nothing is measured")
    return True


def run_rows(rows: Callable[..., Sequence[Row]], description: str | None) -> None:
    """Measure the rows of a module from the command line, and print the table.

    The command has `--threads` and a flag for each argument of `rows`: a switch for a bool, one
    value or several for a tuple. The values of a `Literal`, and a default of several words, are the
    choices.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, help="of torch")
    hints = typing.get_type_hints(rows)
    for name, parameter in inspect.signature(rows).parameters.items():
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        if hints[name] is bool:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            choices = default if isinstance(default[0], str) else None
            options = {"nargs": "+", "type": type(default[0]), "choices": choices}
            parser.add_argument(flag, default=default, **options)
        elif choices := typing.get_args(hints[name]):
            parser.add_argument(flag, default=default, choices=choices)
        else:
            parser.add_argument(flag, default=default, type=hints[name])
    options = vars(parser.parse_args())
    if (threads := options.pop("threads")) is not None:
        torch.set_num_threads(threads)
    table_rows = rows(**options)
    clock = f"{options.get('clock', 'wall')} clock, {torch.get_num_threads()} threads"
    print(f"{machine()}; {clock}\n\n{format_table(table_rows)}")
