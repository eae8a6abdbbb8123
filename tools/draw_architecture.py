# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/architecture.md from the code: packages, and what three walks call.

python -m tools.draw_architecture [--dry-run]

An arrow between packages is an import, unless a longer path of arrows implies it (the transitive
reduction); imports inside functions count. A walk is traced: the files of `megatron.core` that
are entered, in that order, and who enters each first. What stands between the marks of a picture is
replaced; `--dry-run` compares only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType

from tools.code_figures import ROOT, import_graph, read_modules, small_runs

PAGE = ROOT / "docs" / "architecture.md"
CORE = ROOT / "megatron_core" / "megatron" / "core"
#: Entry scripts that are above the application that they are a part of.
SCRIPTS = frozenset({"megatron.hf.convert"})


def packages(root: Path) -> dict[str, set[str]]:
    """Return the imported packages of each package of core and of each application."""

    def package(module: str) -> str:
        segments = module.split(".")
        return ".".join(segments[1:3] if segments[1] == "core" else segments[1:2])

    graph: dict[str, set[str]] = {}
    for module, imported in import_graph(read_modules(root)).items():
        if module in SCRIPTS or package(module) == "core":
            continue
        imported_packages = graph.setdefault(package(module), set())
        imported_packages |= {package(imported_module) for imported_module in imported} - {
            package(module),
            "core",
        }
    return graph


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return a graph without circles less every edge that a longer path replaces."""

    def below(name: str) -> set[str]:
        return set().union(*({target} | below(target) for target in graph[name]))

    return {
        name: {target for target in targets if not any(target in below(o) for o in targets)}
        for name, targets in graph.items()
    }


def picture(edges: Mapping[str, set[str]]) -> list[str]:
    """Return a graph as a Mermaid flow chart from top to bottom."""
    lines = ["```mermaid", "flowchart TD"]
    for name, targets in sorted(edges.items()):
        lines += [f"    {name} --> {target}" for target in sorted(targets)]
    return [*lines, "```"]


def walk(run: Callable[[], object]) -> list[tuple[str, str, str]]:
    """Return (file, function, file that called it) of the first call into each file of core.

    Calls from outside core and from torch have an empty caller.
    """
    steps: dict[str, tuple[str, str]] = {}

    def file_of(frame: FrameType | None) -> str:
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(CORE):
                return path.relative_to(CORE).as_posix()
            frame = frame.f_back
        return ""

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # A package's __getattr__ hands a name on; the walk starts where that name leads.
        if event != "call" or code.co_name == "__getattr__" or code.co_name[0] == "<":
            return
        if str(CORE) not in code.co_filename:
            return
        file = file_of(frame)
        if file not in steps:
            steps[file] = (code.co_qualname, file_of(frame.f_back))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [(file, function, caller) for file, (function, caller) in steps.items()]


def life_of_a_weight() -> None:
    """Train a column-parallel layer for a step and save it."""
    import torch

    from megatron.core.dist_checkpointing import (
        Solo,
        optimizer_chunks,
        save_checkpoint,
        weight_chunks,
    )
    from megatron.core.distributed import DataParallel
    from megatron.core.initialize import InitSpec
    from megatron.core.optimizer import Optimizer
    from megatron.core.process_groups import ProcessGroupCollection
    from megatron.core.tensor_parallel.linear import ColumnParallelLinear, TensorParallelRegion
    from megatron.core.weight_gather import WeightStore

    groups = ProcessGroupCollection.single()
    store = WeightStore(groups)
    layer = ColumnParallelLinear(
        "up",
        [("up", 3, None)],
        input_size=4,
        store=store,
        region=TensorParallelRegion(groups["tp"], sequence_parallel=False),
        init=InitSpec.normal(0.5),
    )
    store.materialize()
    engine = DataParallel(store, groups)
    optimizer = Optimizer(engine.owned(), groups)
    engine.begin_step()
    engine.backward(layer(torch.ones(5, 1, 4)).square().sum(), last=True)
    engine.finish()
    optimizer.step(1e-3)
    chunks = weight_chunks(store) + optimizer_chunks(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, 1, chunks, {}, coordinator=Solo())


def walks() -> dict[str, list[tuple[str, str, str]]]:
    """Trace the life of a weight, a forward pass and a decode step."""
    life_of_a_weight()  # imports
    runs = small_runs(ROOT)
    return {
        "weight": walk(life_of_a_weight),
        "forward": walk(runs["forward"]),
        "decode": walk(runs["decode step"]),
    }


def table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a walk as a table."""
    lines = ["| file of core | first enters | called from |", "|---|---|---|"]
    for file, function, caller in rows:
        name = function.replace(".<locals>", "").replace("_", "\\_")
        # No code span: what is traced is not thereby documented, see tools/dead_code.py.
        lines.append(f"| `{file}` | {name} | {f'`{caller}`' if caller else ''} |")
    return lines


def page(text: str) -> str:
    """Return the page with all pictures redrawn.

    Raises:
        ValueError: the page has no marks for a picture.
    """
    graph = packages(ROOT)
    core = {name: targets for name, targets in graph.items() if name.startswith("core.")}
    short = {
        name.removeprefix("core."): {target.removeprefix("core.") for target in targets}
        for name, targets in reduced(core).items()
    }
    traced = walks()
    drawn = {"packages": picture(short)} | {name: table(rows) for name, rows in traced.items()}
    for name, lines in drawn.items():
        begin, end = f"<!-- drawn: {name} -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{PAGE} has no {begin} and {end}")
        before, _, suffix = text.partition(begin)
        text = "\n".join([before + begin, "", *lines, "", end]) + suffix.partition(end)[2]
    return text


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="only compare, exit 1 if it differs")
    options = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if options.dry_run:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
