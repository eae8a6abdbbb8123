# SPDX-License-Identifier: Apache-2.0
"""Run chains until the requested number of kills is reached."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import count

from tests.functional_tests.small_run import write_tokens
from tools.soak.chain import Chain, Result, Setting, measure
from tools.soak.checks import Reference
from tools.soak.choices import flavour_of
from tools.soak.job import SoakFailure
from tools.soak.pace import Measured
from tools.soak.report import complaint, inside, line, table


class Soak:
    """Kills, checks, and counts.

    Args:
        options: of the command line; `seed` and `folder` are set.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.setting = Setting(
            seed=options.seed,
            ranks=options.ranks,
            iterations=options.iterations,
            disk_seconds=options.disk_milliseconds / 1000,
            plant=options.plant,
            data=write_tokens(options.folder / "tokens"),
            folder=options.folder,
        )
        self.results: list[Result] = []
        self.chains = self.starts = 0
        self.chain: Chain | None = None
        self._references: dict[str, tuple[Reference, Measured]] = {}
        self._began = time.monotonic()

    def run(self) -> None:
        """Kill, check and print a line for each. Raises SoakFailure."""
        for chain in self._chains_to_run():
            self.chain = chain
            for result in chain.run(self.options.kills - len(self.results)):
                self.results.append(result)
                print(line(len(self.results), result), flush=True)
                limit = self.options.seconds_limit
                if limit is not None and time.monotonic() - self._began > limit:
                    raise SoakFailure("late", f"{len(self.results)} kills took {limit:g} s")
            self.chains += 1
            self.starts += chain.starts
            print(f"      chain {chain.number} ended exactly after {chain.starts} starts")
        self.chain = None
        if (short := complaint(self.results)) is not None:
            raise SoakFailure("late", short)

    def _chains_to_run(self) -> Iterator[Chain]:
        only = self.options.chain
        for number in count(1) if only is None else [only]:
            if len(self.results) >= self.options.kills:
                return
            flavour = flavour_of(number, self.options.flavour or ())
            if flavour.name not in self._references:
                measured = Measured()
                self._references[flavour.name] = (
                    measure(self.setting, flavour, measured),
                    measured,
                )
                print(
                    f"      {flavour.name}: a start takes {measured.of('start'):.2f} s, a save "
                    f"{measured.of('save'):.2f} s, from save to save {measured.of('between'):.2f} s"
                )
            reference, measured = self._references[flavour.name]
            yield Chain(
                setting=self.setting,
                number=number,
                flavour=flavour,
                reference=reference,
                measured=measured,
            )

    def summary(self, failure: SoakFailure | None) -> list[str]:
        """Return the last lines."""
        options, results = self.options, self.results
        lines = [
            f"soak: {len(results)} kills ({inside(results)} while a save was under way), "
            f"{self.chains} chains, {self.starts} starts, {time.monotonic() - self._began:.0f} s, "
            f"seed {options.seed}",
            table(results),
        ]
        if failure is None:
            return [*lines, "soak: 0 lost checkpoints, 0 inexact resumes"]
        lines.append(f"soak: FAILED: {failure}")
        if self.chain is not None:
            again = f"--seed {options.seed} --chain {self.chain.number} --ranks {options.ranks}"
            again += f" --iterations {options.iterations} --kills {self.chain.kills + 10}"
            again += f" --disk-milliseconds {options.disk_milliseconds:g}"
            again += "".join(f" --flavour '{name}'" for name in options.flavour or ())
            again += "" if options.plant is None else f" --plant {options.plant}"
            lines.append(
                f"soak: after kill {self.chain.kills} of chain {self.chain.number}; again:"
            )
            lines.append(f"  python -m tools.soak {again}")
        return [*lines, f"soak: files and logs are kept in {options.folder}"]


def soak(options: argparse.Namespace) -> bool:
    """Soak, print, and return whether nothing was found."""
    run = Soak(options)
    failure: SoakFailure | None = None
    try:
        run.run()
    except SoakFailure as failed:
        failure = failed
    print("\n".join(run.summary(failure)))
    return failure is None
