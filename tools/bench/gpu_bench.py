# SPDX-License-Identifier: Apache-2.0
"""A bench on a GPU: independent cases, one after another, within a time limit.

Results are written to disk after every case, so a bench that is stopped loses only the current
case.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from tools.bench.gpu_timing import Call, Stopwatch, measured_rates, ratio_of
from tools.bench.rehearsal import be_interpreted
from tools.bench.table import Peer, Row, format_table, verdict

Size = TypeVar("Size")
MCORE = "ours"


class Bench:
    """What the cases of a bench share.

    Args:
        name: of the bench, in rows.
        options: of the command line, see `options_of`.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.rehearse, self.quick = name, options.rehearse, options.quick
        self.part = None if options.part is None else Path(options.part)
        self.device = torch.device("cpu" if self.rehearse else "cuda")
        self.dtype = torch.float32 if self.rehearse else torch.bfloat16
        self.end = time.monotonic() + options.seconds
        self.watch = Stopwatch(
            self.device, rounds=1 if self.rehearse else 10, warmup=1 if self.rehearse else 3
        )
        self.rates: dict[str, float] = {}
        self.rows: list[Row] = []
        self.problems: dict[str, str] = {}
        self.kernels: dict[str, list[dict]] = {}

    def sized(self, full: Size, rehearsal: Size) -> Size:
        """Return the full size on a GPU, or the rehearsal size for the interpreter."""
        return rehearsal if self.rehearse else full

    def drawn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a normal random tensor on the device, in the bench's dtype."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def race(
        self,
        what: str,
        calls: Mapping[str, Call],
        *,
        flops: float = 0.0,
        moved_bytes: float = 0.0,
        targets: Sequence[str] = (),
        unit: str = "ms",
        count: int = 1,
        note: str = "",
    ) -> None:
        """Time calls in turns; the first is ours, and all others are peers.

        Args:
            what: the op with its sizes.
            calls: calls by name, including `MCORE`.
            flops: operations of the op, for the roofline.
            moved_bytes: bytes that it must read and write, for the roofline.
            targets: see `Row`.
            unit: "ms" or "us".
            count: repetitions of the op within one call; figures are per repetition.
            note: note for the reader.
        """
        timings = self.watch.race(calls)
        factor = {"ms": 1e3, "us": 1e6}[unit] / count
        mcore = statistics.median(timings[MCORE])
        peers = {
            name: Peer(
                figure=factor * statistics.median(peer_seconds),
                ratio=ratio_of(timings[MCORE], peer_seconds),
            )
            for name, peer_seconds in timings.items()
            if name != MCORE
        }
        bounds = []
        if flops:
            bounds.append(flops / self.rates["bf16_flops"])
        if moved_bytes:
            bounds.append(moved_bytes / self.rates["copy_bytes_per_second"])
        self.add(
            what,
            factor * mcore,
            unit=unit,
            peers=peers,
            bound=factor * max(bounds) if bounds else None,
            share=max(bounds) / mcore if bounds else None,
            targets=targets,
            note=note,
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

    def run(self, cases: Iterable[tuple[str, Callable[[Bench], None]]]) -> int:
        """Run the cases; print the table, leave the part, and return the exit code."""
        self.rates = measured_rates(self.watch)
        self._free()
        for name, case in cases:
            if time.monotonic() >= self.end:
                self.problems[name] = "not started: no time left"
                continue
            print(f"bench: {self.name}: {name}", file=sys.stderr, flush=True)
            try:
                case(self)
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
        print(format_table(self.rows))
        for name, problem in self.problems.items():
            print(f"{self.name}: {name}: {problem}")
        print(f"{len(self.rows)} rows, {len(self.problems)} problems")
        return 1 if self.problems else 0

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
        if self.part is None:
            return
        results = {"rates": self.rates, "rows": self.rows, "problems": self.problems}
        text = json.dumps(results | {"kernels": self.kernels})
        self.part.write_text(text, encoding="utf-8")


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the options that all benches on a GPU have; a rehearsal turns the interpreter on."""
    parser.add_argument("--part", default=None, help="file for what was measured, as JSON")
    parser.add_argument("--seconds", type=float, default=600.0, help="no case starts after these")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU, interpreted")
    parser.add_argument("--quick", action="store_true", help="of a rehearsal the quickest part")
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


def require_same(what: str, mcore: torch.Tensor, peer: torch.Tensor, bound: float) -> None:
    """Raise ValueError unless two calls that race compute the same: else the race is void."""
    error = ((mcore - peer).abs().max() / peer.abs().max()).item()
    if not error <= bound:
        raise ValueError(f"{what}: error {error:.2g} > {bound:g}: the race is void")


def with_gradients(
    function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]
) -> tuple[Call, Call]:
    """Return (forward and backward, backward alone) of a function of leaves with gradients."""
    outputs = function(*leaves)
    pull = torch.randn_like(outputs)

    def whole() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, pull)

    def back() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, pull, retain_graph=True)

    return whole, back
