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
IMPLEMENTATIONS = (
    {"__init__.py", "triton.py"},
    {"cpu.py", "triton.py"},
)
#: Every op's folder has files of these names.
ROLES = frozenset({"reference", "triton", "naive", "cpu", "kernels", "__init__", "__main__"})
SKIPPED = frozenset({".git", ".venv", "build", "__pycache__", ".ruff_cache", ".pytest_cache"})
FILE_ENDINGS = frozenset({"json", "jsonl", "md", "pkl", "py", "sh", "toml", "txt", "yaml", "yml"})
Entry = tuple[str, str, int, str, str]  # figure, path, line, text, term


def repeated_classes(files: Mapping[str, Facts]) -> Iterator[Entry]:
    """Yield the classes of core and apps whose name another class there has."""
    definitions: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, facts in files.items():
        for name, line in facts.get("classes", ()) if path.startswith(WHEELS) else ():
            definitions[name].append((path, line))
    for name, locations in definitions.items():
        paths = [PurePosixPath(path) for path, _ in locations]
        same_op = len({path.parent for path in paths}) == 1
        if len(paths) < 2 or (same_op and {path.name for path in paths} in IMPLEMENTATIONS):
            continue
        for path, line in locations:
            siblings = ", ".join(candidate for candidate, _ in locations if candidate != path)
            yield "classes_twice", path, line, name, f"also in {siblings}: rename one"


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
            earlier = seen.setdefault(stem, module)
            related = f"{earlier}.".startswith(f"{module}.") or f"{module}.".startswith(
                f"{earlier}."
            )
            if not related:
                seen[stem] = module
                yield "side_by_side", path, line, module, f"{earlier} is imported here: rename one"


def _dotted(path: str) -> str:
    name = path.removeprefix("megatron_core/").removesuffix(".py").removesuffix("/__init__")
    return name.replace("/", ".")


class References:
    """The possible targets of a back-quoted name, dotted name or path.

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
        self.modules: dict[str, list[str]] = defaultdict(list)  # last segment of the name -> paths
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
        segments = target.replace("/", ".").split(".")
        if target.startswith(self.written) or target in self.words:
            return None
        if self.placeholders.intersection([target, *segments]):
            return None
        if "/" in target:
            return None if self._is_path(target) else "no such file or folder"
        if len(segments) > 1 and segments[0] in self.libraries:
            return None
        unknown = [segment for segment in segments if segment not in self.words]
        if unknown:
            return f"nothing defines {unknown[0]}"
        if segments[-1] in FILE_ENDINGS:
            return None
        variables = self.variables.get(path)
        for end in range(len(segments), 0, -1):
            paths = self._modules_of(segments[:end], path)
            if paths and not (variables and end == 1 and segments[0] in variables):
                return self._missing(segments[end:], paths, path)
        if segments[0] in self.classes:
            return self._missing(segments[1:], self.classes[segments[0]], path)
        if variables is None or len(segments) == 1 or segments[0] in variables:
            return None
        return f"no module, class or variable of this file is {segments[0]}"

    def _is_path(self, target: str) -> bool:
        ending = "/" + target.lstrip("./")
        endings = (ending, ending.rstrip("/") + "/", ending + ".py")
        return any(path.endswith(endings) for path in self.paths)

    def _modules_of(self, segments: list[str], path: str) -> list[str]:
        """Return the files of modules with a dotted name; a role belongs to the op at `path`."""
        dotted, folder = "." + ".".join(segments), path.rpartition("/")[0]
        return [
            candidate
            for candidate in self.modules.get(segments[-1], ())
            if f".{_dotted(candidate)}".endswith(dotted)
            and not (segments[0] in ROLES and candidate.rpartition("/")[0] != folder)
            and (candidate.startswith(WHEELS) or not path.startswith(WHEELS))
        ]

    def _missing(self, segments: list[str], paths: list[str], path: str) -> str | None:
        """Return that no module at `paths` has `segments[0]`, siblings first."""
        folder = path.rpartition("/")[0]
        siblings = [candidate for candidate in paths if candidate.rpartition("/")[0] == folder]
        candidates = siblings or paths
        if (
            not segments
            or not paths
            or any(segments[0] in self.used[candidate] for candidate in candidates)
        ):
            return None
        return f"{candidates[0]} has no {segments[0]}"


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
