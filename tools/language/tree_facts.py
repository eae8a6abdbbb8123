# SPDX-License-Identifier: Apache-2.0
"""Compare the files of the tree: classes of one name, modules of one name, references."""

from __future__ import annotations

import builtins
import keyword
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from tools.language.source_facts import Facts

WHEELS = ("megatron_core/megatron/", "megatron/")
#: One op's implementations of one class, in one folder.
IMPLEMENTATIONS = ({"__init__.py", "triton.py"}, {"reference.py", "triton.py"})
#: Every op's folder has files of these names.
ROLES = frozenset({"reference", "triton", "naive", "cpu", "kernels", "__init__", "__main__"})
SKIPPED = frozenset({".git", ".venv", "build", "__pycache__", ".ruff_cache", ".pytest_cache"})
FILE_ENDINGS = frozenset({"json", "jsonl", "md", "pkl", "py", "sh", "toml", "txt", "yaml", "yml"})
Entry = tuple[str, str, int, str, str]  # figure, path, line, text, term


def repeated_classes(files: Mapping[str, Facts]) -> Iterator[Entry]:
    """Yield the classes of core and apps whose name another class there has."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, facts in files.items():
        for name, line in facts.get("classes", ()) if path.startswith(WHEELS) else ():
            places[name].append((path, line))
    for name, definitions in places.items():
        paths = [PurePosixPath(path) for path, _ in definitions]
        one_op = len({path.parent for path in paths}) == 1
        if len(paths) < 2 or (one_op and {path.name for path in paths} in IMPLEMENTATIONS):
            continue
        for path, line in definitions:
            others = ", ".join(other for other, _ in definitions if other != path)
            yield "classes_twice", path, line, name, f"also in {others}: rename one"


def modules_side_by_side(files: Mapping[str, Facts]) -> Iterator[Entry]:
    """Yield the imports of two unrelated modules of one file name into one file."""
    modules = {_dotted(path) for path in files if path.endswith(".py")}
    for path, facts in files.items():
        seen: dict[str, str] = {}
        for line, base, name in facts.get("imports", ()) if path.startswith(WHEELS) else ():
            module = f"{base}.{name}" if f"{base}.{name}" in modules else base
            stem = module.rpartition(".")[2]
            if module not in modules or stem in ROLES or module.count(".") < 2:
                continue
            other = seen.setdefault(stem, module)
            related = f"{other}.".startswith(f"{module}.") or f"{module}.".startswith(f"{other}.")
            if not related:
                seen[stem] = module
                yield "side_by_side", path, line, module, f"{other} is imported here: rename one"


def _dotted(path: str) -> str:
    name = path.removeprefix("megatron_core/").removesuffix(".py").removesuffix("/__init__")
    return name.replace("/", ".")


class References:
    """What a back-quoted name, dotted name or path can lead to.

    Args:
        root: of the repository.
        files: path -> facts of every file.
        external: the lists of `external.toml`.
    """

    def __init__(
        self, root: Path, files: Mapping[str, Facts], external: Mapping[str, Sequence[str]]
    ) -> None:
        self.external = frozenset(external["names"])
        self.placeholders = frozenset(external["placeholders"])
        self.written = tuple(external["written"])
        self.used = {path: frozenset(facts.get("used", ())) for path, facts in files.items()}
        self.variables = {
            path: set(facts["variables"]) - {name for _, _, name in facts["imports"]}
            for path, facts in files.items()
            if "variables" in facts
        }
        imports = (base for facts in files.values() for _, base, _ in facts.get("imports", ()))
        tops = {base.partition(".")[0] for base in imports}
        self.libraries = tops - {_dotted(path).partition(".")[0] for path in files}
        self.modules: dict[str, list[str]] = defaultdict(list)  # last part of the name -> paths
        self.classes: dict[str, list[str]] = defaultdict(list)
        self.paths = [f"/{path}" for path in _paths(root)]
        for path, facts in files.items():
            self.modules[_dotted(path).rpartition(".")[2]].append(path)
            for name, _ in facts.get("classes", ()):
                self.classes[name].append(path)
        folders_and_files = {path.strip("/").rpartition("/")[2] for path in self.paths}
        defined = frozenset(dir(builtins)).union(keyword.kwlist, *self.used.values())
        self.words = defined | self.modules.keys() | folders_and_files | self.external

    def problem(self, target: str, path: str) -> str | None:
        """Return why a reference in the file at `path` leads nowhere, or None."""
        parts = target.replace("/", ".").split(".")
        if target.startswith(self.written) or target in self.words:
            return None
        if self.placeholders.intersection([target, *parts]):
            return None
        if "/" in target:
            return None if self._is_path(target) else "no such file or folder"
        if len(parts) > 1 and parts[0] in self.libraries:
            return None
        unknown = [part for part in parts if part not in self.words]
        if unknown:
            return f"nothing defines {unknown[0]}"
        if parts[-1] in FILE_ENDINGS:
            return None
        variables = self.variables.get(path)
        for end in range(len(parts), 0, -1):
            paths = self._modules_of(parts[:end], path)
            if paths and not (variables and end == 1 and parts[0] in variables):
                return self._missing(parts[end:], paths, path)
        if parts[0] in self.classes:
            return self._missing(parts[1:], self.classes[parts[0]], path)
        if variables is None or len(parts) == 1 or parts[0] in variables:
            return None
        return f"no module, class or variable of this file is {parts[0]}"

    def _is_path(self, target: str) -> bool:
        ending = "/" + target.lstrip("./")
        endings = (ending, ending.rstrip("/") + "/", ending + ".py")
        return any(path.endswith(endings) for path in self.paths)

    def _modules_of(self, parts: list[str], path: str) -> list[str]:
        """Return the files of modules with a dotted name; a role is that of the op at `path`."""
        dotted, folder = "." + ".".join(parts), path.rpartition("/")[0]
        return [
            other
            for other in self.modules.get(parts[-1], ())
            if f".{_dotted(other)}".endswith(dotted)
            and not (parts[0] in ROLES and other.rpartition("/")[0] != folder)
            and (other.startswith(WHEELS) or not path.startswith(WHEELS))
        ]

    def _missing(self, parts: list[str], paths: list[str], path: str) -> str | None:
        """Return that no module at `paths` has `parts[0]`, siblings first."""
        folder = path.rpartition("/")[0]
        siblings = [other for other in paths if other.rpartition("/")[0] == folder]
        candidates = siblings or paths
        if not parts or not paths or any(parts[0] in self.used[other] for other in candidates):
            return None
        return f"{candidates[0]} has no {parts[0]}"


def _paths(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in names)
        yield from (f"{(relative / name).as_posix()}/" for name in subfolders)


def dangling(
    root: Path, files: Mapping[str, Facts], external: Mapping[str, Sequence[str]]
) -> Iterator[Entry]:
    """Yield the references of docstrings, comments and pages that lead nowhere."""
    index = References(root, files, external)
    for path, facts in files.items():
        for line, target in facts["references"]:
            problem = index.problem(target, path)
            if problem is not None:
                yield "dangling", path, line, target, problem
