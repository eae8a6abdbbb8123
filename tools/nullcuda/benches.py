# SPDX-License-Identifier: Apache-2.0
"""Run a bench of tools/bench over the null device, without its checks of values and speed.

python -m tools.nullcuda.benches gpu_train --part FILE

A race is normally void if two calls compute different values or if a loss is implausible; here the
calls compute nothing. The bench passes if every call runs without a problem. Times are not printed,
because they have no meaning; memory peaks are printed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tools.bench import cases, gpu_workers, harness, turns
from tools.bench.table import Row
from tools.nullcuda.values import plausible_tokens

#: Of a model that has begun to learn, as gpu_train expects one.
LOSS = 8.0


def plausible_losses(*arguments: Any, **options: Any) -> Any:
    """Run steps as `turns.take_turns` does, and let every loss be one of a model that learns."""
    race = _TAKE_TURNS(*arguments, **options)
    for variant in race.values():
        variant.values = [LOSS for _ in variant.values]
    return race


_TAKE_TURNS = turns.take_turns


def names_of(rows: Sequence[Row]) -> str:
    """Return the names of the rows without times, which have no meaning; memory is real."""
    lines = []
    for row in rows:
        peers = {name: peer["figure"] for name, peer in row["peers"].items()}
        figures = {"ours": row["ours"], **peers} if row["unit"] == "GB" else {}
        labels = [f"{name} {figure:.1f} GB" for name, figure in figures.items()]
        lines.append(f"{row['what']}: {', '.join(labels) or f'ran, beside {len(peers)} peers'}")
    return "\n".join(lines)


def main() -> int:
    """Run the bench that is named first, with the other words as its command line."""
    name, *words = sys.argv[1:]
    cases.require_same = lambda *_, **__: None
    harness.format_table = names_of
    turns.take_turns = gpu_workers.take_turns = plausible_losses
    bench = importlib.import_module(f"tools.bench.{name}")
    sys.argv = [name, *words]
    with plausible_tokens():
        return bench.main()


if __name__ == "__main__":
    sys.exit(main())
