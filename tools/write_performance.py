# SPDX-License-Identifier: Apache-2.0
"""Write the measured sections of docs/performance.md, from bench_results: GPU results from its
.json files, and CPU tables from cpu-*.md.

python -m tools.write_performance            write them
python -m tools.write_performance --check    exit 1 unless they are as written

The text of the page is in the page. The results stand between its targets and the section `GUIDE`;
the CPU tables follow the command that makes them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench.results import rows_of, text_of
from tools.bench.table import verdict

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench_results", ROOT / "docs/performance.md"
TARGETS, GUIDE = "\n## Targets\n", "\n## First hour on a GPU\n"
CPU_COMMAND = "> bench_results/cpu-decode.md\n```\n\n"


def read(folder: Path) -> list[dict]:
    """Return every result in a folder, the newest first."""
    results = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda result: result["when"], reverse=True)


def read_cpu(folder: Path) -> str:
    """Return the tables of benchmarks on CPUs."""
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("cpu-*.md")))


def page(text: str, results: Sequence[Mapping], on_cpus: str) -> str:
    """Return a page with other results in it.

    Args:
        text: the page.
        results: of GPUs, the newest first; none keeps the section that says so.
        on_cpus: tables of benchmarks on CPUs.
    """
    head, guide = text[: text.index(GUIDE)], text[text.index(GUIDE) :]
    if results:
        table_end = head.index("\n\n", head.index("\n| ", head.index(TARGETS))) + 2
        sections = "\n".join(text_of(result) for result in results)
        head = f"{head[:table_end]}{_counted(results[0])}\n\n{sections}"
    return head + guide[: guide.index(CPU_COMMAND)] + CPU_COMMAND + on_cpus


def _counted(result: Mapping) -> str:
    """Return a sentence with the number of targets that the newest result meets."""
    verdicts = [verdict(row, target) for row in rows_of(result) for target in row["targets"]]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("met", "missed", "open"))
    device, day = result["machine"]["device"], result["when"][:10]
    return f"Of the {len(verdicts)} targets in the newest results ({device}, {day}): {counts}."


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if it differs")
    options = parser.parse_args()
    written = PAGE.read_text("utf-8")
    text = page(written, read(RESULTS), read_cpu(RESULTS))
    if options.check:
        word = "as" if written == text else "not as"
        print(f"{PAGE.name} is {word} tools/write_performance.py writes it")
        return 0 if written == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
