# SPDX-License-Identifier: Apache-2.0
"""Run rows with a fault planted in their ranks, and report how the fault was detected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tests.parity.rows import world_of
from tests.parity.training import Run, rank_of_row
from tests.parity.verdict import Reference, assert_agrees, reference_of
from tests.support.covering_array import Row
from tests.support.executed import Ran, spans_run
from tests.support.mutants import Mutation, Verdict
from tests.support.ranks import RankFailure, run_ranks

#: Seconds after which a hanging mutant counts as detected.
HANG_SECONDS = 30.0


class Hunt:
    """Rows that detect faults, with their references."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._references: dict[int, Reference] = {}

    def reference(self, index: int) -> Reference:
        """Return the single-process run of row `index`, cached."""
        if index not in self._references:
            self._references[index] = reference_of(self.rows[index])
        return self._references[index]

    def runs(self, index: int, *faults: Mutation) -> list[Run]:
        """Run a row on its ranks with faults. Raises RankFailure if it crashes or hangs."""
        row, initial = self.reference(index).row, self.reference(index).initial
        return run_ranks(rank_of_row, world_of(row), row, initial, faults, timeout=HANG_SECONDS)

    def verdict(self, mutation: Mutation) -> Verdict:
        """Run rows until one detects the mutation."""
        for index in range(len(self.rows)):
            try:
                runs = self.runs(index, mutation)
                assert_agrees(self.rows[index], runs, self.reference(index))
            except RankFailure as error:
                return Verdict(mutation, str(error).strip().splitlines()[-1][:200])
            except AssertionError as error:
                return Verdict(mutation, (str(error).strip() or repr(error)).splitlines()[0][:200])
        return Verdict(mutation, None)

    def spans(self, modules: Sequence[str]) -> Ran:
        """Return the code of `modules` that the first and the last rank of any row execute."""
        ran: Ran = {module: set() for module in modules}
        for index in range(len(self.rows)):
            row, initial = self.reference(index).row, self.reference(index).initial
            for spans_of_rank in run_ranks(
                _traced_rank, world_of(row), row, initial, tuple(modules)
            ):
                for module, spans in spans_of_rank.items():
                    ran[module] |= spans
        return ran


def _traced_rank(
    rank: int,
    world: int,
    row: Row,
    initial: Mapping[str, torch.Tensor],
    modules: tuple[str, ...],
) -> Ran:
    if 0 < rank < world - 1:  # tracing is slow
        rank_of_row(rank, world, row, initial)
        return {}
    return spans_run(modules, lambda: rank_of_row(rank, world, row, initial))
