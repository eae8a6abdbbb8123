# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark and print one table.

python -m tools.bench                  all benchmarks: 30 min on two cores
python -m tools.bench --quick          all benchmarks, fewer repeats, smaller shapes: about 8 min
python -m tools.bench --quick data startup
python -m tools.bench serve --peers    generation against llama.cpp, if it is installed
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time

from tools.bench.table import Row, format_table, machine

BENCHES = (
    "data",
    "checkpoint",
    "background_save",
    "ops",
    "startup",
    "train",
    "data_parallel",
    "pipeline",
    "context_parallel",
    "moe",
    "inference",
    "serve",
)


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benches", nargs="*", metavar="bench", help=", ".join(BENCHES))
    parser.add_argument("--quick", action="store_true", help="fewer repeats, smaller shapes")
    parser.add_argument(
        "--peers", action="store_true", help="serve: generation against llama.cpp instead"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.benches) - set(BENCHES):
        parser.error(f"unknown bench {', '.join(sorted(unknown))}: one of {', '.join(BENCHES)}")
    if arguments.peers and arguments.benches != ["serve"]:
        parser.error("--peers applies to serve: python -m tools.bench serve --peers")
    if arguments.peers and importlib.util.find_spec("llama_cpp") is None:
        parser.error("--peers needs llama.cpp: pip install llama-cpp-python gguf")
    table_rows: list[Row] = []
    begun = time.perf_counter()
    for name in arguments.benches or BENCHES:
        start = time.perf_counter()
        module = importlib.import_module(
            "tools.bench.llama_cpp" if arguments.peers else f"tools.bench.{name}"
        )
        table_rows += module.rows(arguments.quick)
        print(f"bench: {name}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    duration = f"{(time.perf_counter() - begun) / 60:.1f} minutes{', --quick' * arguments.quick}"
    print(f"{machine()}; {duration}\n\n{format_table(table_rows)}")


if __name__ == "__main__":
    main()
