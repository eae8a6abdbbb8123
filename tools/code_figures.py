# SPDX-License-Identifier: Apache-2.0
"""Print figures of the source: code lines, files, import structure, calls of a small GPT.

    python -m tools.code_figures [--root DIR] [--json | --list]

Counted are the wheels: `megatron.core` and the applications.

Code lines exclude docstrings, comments and blank lines. A module imports another if any of its
statements does, including statements inside functions and under TYPE_CHECKING. "One importer":
modules with exactly one importer, as a share of all modules that could be merged into their
importer; entry points, an op's implementations (kernels, `naive`, `cpu`) and `__init__`s cannot.
"Circles" are import cycles, where a name imported from a package counts as an import of the module
that defines it. "Arrows up in training": imports inside megatron.training against the order of its
import-linter contract.

Calls are Python calls inside the wheels, of a GPT of two layers on one process: building it, a
forward pass with loss, and one decode step; with the number of files that they are in. "Files:
request" counts the files of `megatron.inference` that a streamed completion enters, in the HTTP
process and in the engine process, until its first token is sent. `--root` traces the wheels of
another checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from tools.style_rules import code_lines

ROOT = Path(__file__).resolve().parent.parent
#: Folders of the wheels, below the root, and the package that each is a part of.
WHEELS = {
    "megatron_core/megatron/core": "megatron.core",
    "megatron/training": "megatron.training",
    "megatron/inference": "megatron.inference",
    "megatron/hf": "megatron.hf",
    "megatron/cli": "megatron.cli",
}

#: The package whose arrows up are counted.
TRAINING = "megatron.training"


class Module:
    """One source file.

    Args:
        name: dotted name; the package's name for its `__init__`.
        path: path of the file.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.lines = self.text.count("\n")

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def is_entry(self) -> bool:
        """Whether it can be run with `python -m`."""
        return "\nif __name__ == " in self.text or self.path.name == "__main__.py"

    @property
    def is_kernel(self) -> bool:
        """Whether it holds Triton code, which is imported where Triton is installed."""
        return "triton" in self.path.stem or self.path.stem.endswith("kernels")

    @property
    def is_implementation(self) -> bool:
        """Whether it is the specification or the plain-torch implementation of an op."""
        return ".core.ops." in self.name and self.path.stem in ("naive", "cpu")

    @property
    def could_be_a_part(self) -> bool:
        """Whether its code could stand in a module that imports it."""
        is_apart = self.is_entry or self.is_kernel or self.is_implementation
        return not (is_apart or self.path.name == "__init__.py")

    def imported(self) -> Iterator[tuple[str, str | None]]:
        """Yield (module, name or None) of everything that it imports."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    segments = self.package.split(".")
                    base = ".".join(
                        [*segments[: len(segments) - node.level + 1], *filter(None, [base])]
                    )
                yield from ((base, alias.name) for alias in node.names)


def read_modules(root: Path) -> dict[str, Module]:
    """Return the modules of the wheels by name."""
    modules = {}
    for folder, package in WHEELS.items():
        for path in sorted((root / folder).rglob("*.py")):
            segments = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join([package, *(segment for segment in segments if segment != "__init__")])
            modules[name] = Module(name, path)
    return modules


def import_graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Return which modules each imports; a re-exported name leads to where it is defined."""
    exports: dict[str, dict[str, tuple[str, str | None]]] = {}
    for name, module in modules.items():
        if module.path.name == "__init__.py":
            exports[name] = {what: (base, what) for base, what in module.imported() if what}

    def target(base: str, what: str | None) -> str | None:
        if what is not None and f"{base}.{what}" in modules:
            return f"{base}.{what}"
        if what is not None and what in exports.get(base, {}):
            further = exports[base][what]
            if further != (base, what):
                return target(*further)
        return base if base in modules else None

    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for base, what in module.imported():
            if (imported := target(base, what)) is not None and imported != name:
                graph[name].add(imported)
    return graph


def single_importers(modules: dict[str, Module]) -> dict[str, str]:
    """Return {module: importer} of the mergeable modules with exactly one importer.

    A name imported from a package counts as an import of the package.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for base, what in module.imported():
            imported = f"{base}.{what}" if f"{base}.{what}" in modules else base
            if imported in modules and imported != name:
                importers[imported].add(name)
    return {
        name: next(iter(by))
        for name, by in sorted(importers.items())
        if len(by) == 1 and modules[name].could_be_a_part
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected sets of modules (Tarjan 1972), without single ones."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for imported in sorted(graph[name]):
            if imported not in index:
                visit(imported)
                low[name] = min(low[name], low[imported])
            elif imported in stack:
                low[name] = min(low[name], index[imported])
        if low[name] == index[name]:
            position = stack.index(name)
            members = stack[position:]
            del stack[position:]
            if len(members) > 1:
                cycles.append(sorted(members))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10 * len(graph)))
    for name in sorted(graph):
        if name not in index:
            visit(name)
    sys.setrecursionlimit(limit)
    return cycles


def layer_order(root: Path, container: str) -> dict[str, int]:
    """Return the layer of each child of a package, 0 on top, in its import-linter contract."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [container]:
            layers = enumerate(contract["layers"])
            return {child: depth for depth, layer in layers for child in re.findall(r"\w+", layer)}
    return {}


def arrows_up(
    graph: dict[str, set[str]], layers: dict[str, int], container: str
) -> list[tuple[str, str]]:
    """Return (importer, imported) of the imports inside a package against its order.

    Args:
        layers: the layer of each child of the package, 0 on top.
    """

    def depth(module: str) -> int | None:
        name = module.removeprefix(f"{container}.")
        return None if name == module else layers.get(name.partition(".")[0])

    arrows = []
    for importer in graph:
        for imported in graph[importer]:
            below, above = depth(importer), depth(imported)
            if below is not None and above is not None and below > above:
                arrows.append((importer, imported))
    return sorted(arrows)


def calls_of(run: Callable[[], object], root: Path) -> tuple[int, int]:
    """Return how many Python calls inside the wheels `run` makes, and in how many files."""
    folders = tuple(str(root / folder) for folder in WHEELS)
    seen: dict[str, int] = defaultdict(int)

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        # A comprehension is a call in Python 3.11 and none in 3.12.
        if event == "call" and path.startswith(folders) and frame.f_code.co_name[0] != "<":
            seen[path] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(seen.values()), len(seen)


def small_runs(root: Path) -> dict[str, Callable[[], object]]:
    """Return the traced functions by name: building a GPT of two layers, a forward pass with loss
    of another GPT, and its decode step. Each function can be called once.

    Raises:
        ValueError: `megatron.core` is imported from elsewhere than `root`.
    """
    import torch

    import megatron.core
    from megatron.core.inference import EngineConfig
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.requests import EngineRequest
    from megatron.core.inference.sampling import SamplingParams
    from megatron.core.models.gpt import GPTConfig, GPTModel
    from megatron.core.process_groups import ProcessGroupCollection
    from megatron.core.transformer import AttentionConfig, MLPConfig

    if not Path(megatron.core.__file__).is_relative_to(root):
        raise ValueError(f"megatron.core is imported from {megatron.core.__file__}: run in {root}")
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        vocab_size=64,
        attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=8),
        mlp=MLPConfig(ffn_hidden_size=64),
    )

    groups = ProcessGroupCollection.single()

    def build() -> GPTModel:
        return GPTModel(config, groups, seed=1)

    model = build()
    tokens = torch.arange(16).view(2, 8)
    weights = torch.full(tokens.shape, 1 / tokens.numel())
    model.loss(tokens, tokens, weights)  # what is made once
    engine = Engine(model, EngineConfig(num_blocks=4))
    engine.add(
        EngineRequest(prompt=(1, 2, 3), max_new_tokens=9, sampling=SamplingParams(temperature=0))
    )
    for _ in range(3):
        engine.step()
    return {
        "build": build,
        "forward": lambda: model.loss(tokens, tokens, weights),
        "decode step": engine.step,
    }


def request_path(root: Path) -> list[str]:
    """Return the files of `megatron.inference` that a streamed completion enters until its first
    token is sent, in this order."""
    from tests.support.http_server import served

    folder, entered, running = (
        str(root / "megatron/inference"),
        dict[str, None](),
        threading.Event(),
    )

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and running.is_set() and path.startswith(folder):
            entered[path.removeprefix(folder + "/")] = None

    threading.setprofile(profile)  # of the threads that start now: HTTP process and engine
    try:
        with served() as server:
            server.http.get("/health")  # the server runs; this request writes no line to the log
            running.set()
            fields = {"prompt": "ab", "max_tokens": 99, "stream": True}
            with server.http.stream("POST", "/v1/completions", json=fields) as response:
                next(response.iter_lines())
                running.clear()
    finally:
        threading.setprofile(None)
    return list(entered)


def figures(root: Path) -> dict[str, object]:
    """Return all figures by name."""
    modules = read_modules(root)
    graph = import_graph(modules)
    core = [m for name, m in modules.items() if name.startswith("megatron.core")]
    apps = [m for name, m in modules.items() if not name.startswith("megatron.core")]
    single, possible = single_importers(modules), [m for m in modules.values() if m.could_be_a_part]
    figure_by_name: dict[str, object] = {
        "code lines": sum(code_lines(m.text, m.tree) for m in modules.values()),
        "code lines of core": sum(code_lines(m.text, m.tree) for m in core),
        "code lines of the apps": sum(code_lines(m.text, m.tree) for m in apps),
        "files": len(modules),
        "files of core": len(core),
        "files of the apps": len(apps),
        "median lines of a file": statistics.median(m.lines for m in modules.values()),
        "modules with one importer": len(single),
        "modules with one importer, %": round(100 * len(single) / len(possible), 1),
        "circles": len(circles(graph)),
        "modules in circles": sum(map(len, circles(graph))),
        "modules that pretraining imports": len(graph.get("megatron.training.pretraining", ())),
    }
    if layers := layer_order(root, TRAINING):
        figure_by_name["arrows up in training"] = len(arrows_up(graph, layers, TRAINING))
    for what, run in small_runs(root).items():
        figure_by_name[f"calls: {what}"], figure_by_name[f"files: {what}"] = calls_of(run, root)
    figure_by_name["files: request"] = len(request_path(root))
    return figure_by_name


def main() -> None:
    """Print the figures; with `--list`, the modules behind them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--list", action="store_true", help="name the modules that are counted")
    args = parser.parse_args()
    root = args.root.resolve()
    if args.list:
        modules = read_modules(root)
        for name, by in single_importers(modules).items():
            print(f"one importer: {name} ({modules[name].lines} lines) <- {by}")
        graph = import_graph(modules)
        for members in circles(graph):
            print("circle:", " ".join(members))
        for path in request_path(root):
            print(f"request: {path}")
        for importer, imported in arrows_up(graph, layer_order(root, TRAINING), TRAINING):
            print(f"arrow up: {importer} -> {imported}")
        return
    figure_by_name = figures(root)
    if args.json:
        print(json.dumps(figure_by_name, indent=1))
        return
    for what, value in figure_by_name.items():
        print(f"{value:>10,}  {what}")


if __name__ == "__main__":
    main()
