# SPDX-License-Identifier: Apache-2.0
"""Run a bench of tools/bench over the null device, with nothing in it that judges values or speed.

python -m tools.nullcuda.benches gpu_train --part FILE

A race is void where two calls compute different things or where a loss is not plausible: here both
compute nothing. Rows are of no use; that there are rows, and no problems, is.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from tools.bench import gpu_bench, gpu_workers
from tools.nullcuda.values import plausible_tokens

#: Of a model that has begun to learn, as gpu_train expects one.
LOSS = 8.0


def plausible_losses(*arguments: Any, **options: Any) -> Any:
    """Race as `gpu_workers.race` does, and let every loss be one of a model that learns."""
    races = _RACE(*arguments, **options)
    for race in races:
        for variant in race.values():
            variant.values = [LOSS for _ in variant.values]
    return races


_RACE = gpu_workers.race


def main() -> int:
    """Run the bench that is named first, with the other words as its command line."""
    name, *words = sys.argv[1:]
    gpu_bench.require_same = lambda *_, **__: None
    gpu_workers.race = plausible_losses
    bench = importlib.import_module(f"tools.bench.{name}")
    sys.argv = [name, *words]
    with plausible_tokens():
        return bench.main()


if __name__ == "__main__":
    sys.exit(main())
