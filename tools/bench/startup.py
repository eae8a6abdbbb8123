# SPDX-License-Identifier: Apache-2.0
"""Seconds until work can begin: importing the model, and the --help of the entry points.

python -m tools.bench.startup
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from tools.bench.harness import run_rows
from tools.bench.table import Row, compared

#: What an import adds to `import torch`: label, module.
IMPORTS = (
    ("ours", "megatron.core.models.gpt"),
    ("transformers", "transformers.models.llama.modeling_llama"),
)
ENTRY_POINTS = ("megatron.training.pretrain_gpt", "megatron.inference.generate")

_ADDED = """
import importlib, time
import torch
start = time.perf_counter()
importlib.import_module({module!r})
print(time.perf_counter() - start)
"""


def added_seconds(module: str) -> float:
    """Return what importing `module` takes in a new process that has imported torch."""
    command = [sys.executable, "-c", _ADDED.format(module=module)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def help_seconds(module: str) -> float:
    """Return what `python -m module --help` takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", module, "--help"], check=True, capture_output=True)
    return time.perf_counter() - start


def rows(quick: bool = False) -> list[Row]:
    """Measure everything in turns, three times or seven."""
    imports: dict[str, list[float]] = {label: [] for label, _ in IMPORTS}
    helps: dict[str, list[float]] = {module: [] for module in ENTRY_POINTS}
    for _ in range(3 if quick else 7):
        for label, module in IMPORTS:
            imports[label].append(added_seconds(module))
        for module in ENTRY_POINTS:
            helps[module].append(help_seconds(module))
    mcore, peer = (statistics.median(imports[label]) for label, _ in IMPORTS)
    what = "seconds that import megatron.core.models.gpt adds to import torch"
    table_rows = [
        compared(bench="startup", what=what, mcore=mcore, target="<= 0.5"),
        compared(
            bench="startup",
            what="the same / transformers' Llama",
            mcore=mcore,
            peer=peer,
            ratio=mcore / peer,
            target="",
        ),
    ]
    for module, seconds in helps.items():
        what = f"seconds of {module} --help"
        median = statistics.median(seconds)
        table_rows.append(compared(bench="startup", what=what, mcore=median, target="<= 3.0"))
    return table_rows


if __name__ == "__main__":
    run_rows(rows, __doc__)
