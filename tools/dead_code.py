# SPDX-License-Identifier: Apache-2.0
"""Print unreachable modules, functions, classes, methods and constants of the two wheels.

    python tools/dead_code.py [--root DIR]

A static walk by names: it starts at the roots, and a definition is live if live code mentions its
name, whatever the name resolves to. In doubt a definition is live, so one name should have one
meaning. Prints `path:line qualified.name` for each dead one, and exits 1 if there is any that
`dead_allowed.toml` does not list, or an entry there that nothing needs.

Roots:
    1. modules that run as a program: `if __name__ == "__main__"`, or a script of a pyproject.toml;
    2. a name in the `__all__` of a package which README.md or docs/*.md documents: a code span that
       is the name or a call of it, or a Python code block with it in it; and a module that is named
       in full, as in `megatron.core.models.gpt_config`, unless it is a package or a program;
    3. names that tools/ and experimental/ mention. Tests never count;
    4. the entries of dead_allowed.toml, each with a reason: a definition, a module or a package,
       whose definitions are then all roots.

Docstrings, imports and entries of `__all__` mention nothing, nor does a name that the function
itself binds; an import makes the module live. A method lives where its class does and its name is
mentioned. Special methods live with their class, and so do overrides of methods that a library
calls (`LIBRARY_CALLS`) if a base class is foreign.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Folder of the modules that are checked -> folder that their dotted names begin behind.
WHEELS = {
    "megatron_core/megatron/core": "megatron_core",
    **dict.fromkeys(
        ("megatron/training", "megatron/inference", "megatron/hf", "megatron/cli"), "."
    ),
}
#: Folders whose mentions count as use.
USERS = ("tools", "experimental")
DOCUMENTS = ("README.md", "megatron_core/README.md", "docs/*.md")
ALLOWED = "tools/dead_allowed.toml"

#: Methods that torch and the standard library call on classes derived from theirs.
LIBRARY_CALLS = frozenset(
    ("forward", "backward", "setup_context", "extra_repr", "run", "emit", "format", "filter")
    + ("handle_error", "write", "flush", "read", "readline", "close", "seek", "tell", "fileno")
    + ("readable", "writable", "seekable", "isatty", "readinto", "find_spec", "exec_module")
    + ("_apply", "_load_from_state_dict", "_save_to_state_dict", "get_parameter", "ignore_aliases")
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Definition:
    """One module, function, class, method or constant, and the words that its code mentions."""

    module: str
    name: str  #: qualified in the module; "" is the module itself
    path: str
    line: int
    words: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)

    @property
    def dotted_name(self) -> str:
        return f"{self.module}.{self.name}".rstrip(".")

    @property
    def owner(self) -> str | None:
        """The class of a method."""
        return self.name.rpartition(".")[0] or None

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.dotted_name}"


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, and those in its if, try and with statements."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines: a function, a class or constants."""
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not re.fullmatch(r"__\w+__", name)]


def _code(node: ast.AST, skipped: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of code without docstrings, `__all__` and `skipped` nodes."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node):
        children.remove(node.body[0])
    for child in children:
        is_exports = isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__all__"
        if child not in skipped and not is_exports:
            yield from _code(child, skipped)


def words_of(node: ast.AST, skipped: Iterable[ast.AST] = ()) -> set[str]:
    """Return the names, attributes and quoted names that code mentions."""
    nodes, words, bound = list(_code(node, skipped)), set[str](), set[str]()
    for inner in nodes if isinstance(node, Function) else ():
        if isinstance(inner, ast.arg):
            bound.add(inner.arg)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            bound.add(inner.id)
    for inner in nodes:
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            words |= {inner.id} - bound
        elif isinstance(inner, ast.Attribute) and not isinstance(inner.ctx, ast.Store):
            words.add(inner.attr)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            words.update(re.findall(r"[A-Za-z_]\w*", inner.value)[:1])
            words.update(re.findall(r"megatron[\w.]+", inner.value))
            words.update(re.findall(r"from megatron[\w.]+ import (\w+)", inner.value))
    return words


class Module:
    """One parsed file: its definitions, the modules that it imports, and its `__all__`."""

    def __init__(self, path: Path, root: Path, base: Path) -> None:
        segments = list(path.relative_to(base).with_suffix("").parts)
        self.is_package = segments[-1] == "__init__"
        self.name = ".".join(segments[: len(segments) - self.is_package])
        self.path = path.relative_to(root).as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        self.imported, self.exports = set[str](), set[str]()
        self._original_names: dict[str, str] = {}
        self.definitions: list[Definition] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self.imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imported |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
                self._original_names |= {a.asname: a.name for a in node.names if a.asname}
        self._define()

    @property
    def is_program(self) -> bool:
        tests = [ast.unparse(node.test) for node in self.tree.body if isinstance(node, ast.If)]
        return "__name__ == '__main__'" in tests

    def words(self, node: ast.AST, skipped: Iterable[ast.AST] = ()) -> set[str]:
        """Return the words of a node, with the original names of imports."""
        words = words_of(node, skipped)
        return words | {self._original_names[word] for word in words & self._original_names.keys()}

    def _add(self, name: str, line: int, words: set[str], bases: Iterable[str] = ()) -> None:
        self.definitions.append(
            Definition(self.name, name, self.path, line, words, bases=list(bases))
        )

    def _define(self) -> None:
        defining = []
        for node in statements(self.tree.body):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                strings = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                self.exports = {value for value in strings if isinstance(value, str)} or {"*"}
            if not (names := defined_names(node)):
                continue
            defining.append(node)
            methods, bases = [], []
            if isinstance(node, ast.ClassDef):
                methods = [m for m in statements(node.body) if isinstance(m, Function)]
                bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
            for name in names:
                self._add(name, node.lineno, self.words(node, methods), bases)
            for method in methods:
                self._add(f"{names[0]}.{method.name}", method.lineno, self.words(method))
        self._add("", 1, self.words(self.tree, defining))


class Wheels:
    """The modules of both wheels, their definitions, and the roots among them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for folder, base in WHEELS.items():
            for path in sorted((root / folder).rglob("*.py")):
                module = Module(path, root, root / base)
                self.modules[module.name] = module
        self.definitions = [d for module in self.modules.values() for d in module.definitions]
        self._bases = {d.name: d.bases for d in self.definitions if "." not in d.name}

    def _has_foreign_base(self, name: str) -> bool:
        """Return whether a class derives from a class of a library."""
        bases = self._bases[name]
        return any(b not in self._bases or self._has_foreign_base(b) for b in bases if b != name)

    def lives_with_owner(self, method: Definition) -> bool:
        """Return whether the class alone keeps a method alive."""
        name = method.name.rpartition(".")[2]
        is_called = name in LIBRARY_CALLS or name.startswith(("visit_", "do_"))
        return bool(re.fullmatch(r"__\w+__", name)) or (
            is_called and self._has_foreign_base(method.owner or "")
        )

    def documented(self) -> tuple[set[str], set[str]]:
        """Return the (dotted names, words) that documents use."""
        names, words = set[str](), set[str]()
        exports = {word for module in self.modules.values() for word in module.exports}
        methods = {d.name.rpartition(".")[2] for d in self.definitions if d.owner}
        for path in [path for pattern in DOCUMENTS for path in sorted(self.root.glob(pattern))]:
            text = path.read_text(encoding="utf-8")
            blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
            spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
            called = [re.fullmatch(r"(?:\w+\.)*(\w+)(?:\(.*\))?", span) for span in spans]
            candidates = {match[1] for match in called if match}
            for language, code in blocks:
                if language == "python":
                    candidates.update(re.findall(r"\w+", code))
                    names |= set(re.findall(r"from (megatron[\w.]+) import", code))
            for code in [*spans, *(code for _, code in blocks)]:
                words |= methods & set(re.findall(r"\.([A-Za-z_]\w*)", code))
                names |= set(re.findall(r"\bmegatron(?:\.\w+)+", code))
            words |= candidates if "*" in exports else candidates & exports
        return names, words

    def roots(self) -> tuple[set[str], set[str]]:
        """Return the (dotted names, words) of programs, documents and users."""
        names, words = self.documented()
        for name in [n for n in names if n in self.modules]:
            module = self.modules[name]
            if not (module.is_package or module.is_program):
                public = [d for d in module.definitions if not re.search(r"(^|\.)_", d.name)]
                names |= {d.dotted_name for d in public}
        names |= {module.name for module in self.modules.values() if module.is_program}
        for path in [self.root / "pyproject.toml", self.root / "megatron_core/pyproject.toml"]:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            names |= {f"{a}.{b}" for a, b in re.findall(r'"(megatron[\w.]+):(\w+)"', text)}
        for folder in USERS:
            for path in sorted((self.root / folder).rglob("*.py")):
                if "tests" not in path.relative_to(self.root).parts:
                    user = Module(path, self.root, self.root)
                    names |= user.imported & self.modules.keys()
                    words |= user.words(user.tree)
        return names, words

    def covered(self, entry: str) -> list[Definition]:
        """Return the definitions that an entry of the list names: one, or all of a module."""
        if entry in self.modules:
            return [d for d in self.definitions if f"{d.module}.".startswith(f"{entry}.")]
        return [d for d in self.definitions if d.dotted_name == entry]

    def live(self, roots: tuple[set[str], set[str]], entries: Iterable[str]) -> set[str]:
        """Return the dotted names of the definitions that roots and entries of the list reach."""
        names, words = set(roots[0]), set(roots[1])
        names |= {d.dotted_name for entry in entries for d in self.covered(entry)}
        live: set[str] = set()
        waiting = self.definitions
        while True:
            reached = [d for d in waiting if self._is_reached(d, names, words, live)]
            if not reached:
                return live
            for definition in reached:
                live.add(definition.dotted_name)
                words |= definition.words
                # A definition runs its module and the packages above; a method needs its class.
                segments = definition.module.split(".")
                names |= {".".join(segments[:length]) for length in range(1, len(segments) + 1)}
                names |= self.modules[definition.module].imported & self.modules.keys()
                if definition.owner:
                    names.add(f"{definition.module}.{definition.owner}")
            waiting = [d for d in waiting if d.dotted_name not in live]

    def _is_reached(
        self, definition: Definition, names: set[str], words: set[str], live: set[str]
    ) -> bool:
        if definition.dotted_name in names:
            return True
        if definition.owner is None:
            return definition.name in words
        if f"{definition.module}.{definition.owner}" not in live:
            return False
        return definition.name.rpartition(".")[2] in words or self.lives_with_owner(definition)


def read_allowed(root: Path) -> dict[str, str]:
    """Read the list: name -> reason.

    Raises:
        ValueError: an entry without a reason, or one name twice.
    """
    path = root / ALLOWED
    allowed: dict[str, str] = {}
    if path.is_file():
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("allowed", []):
            name, reason = entry["name"], entry.get("reason", "")
            if len(reason.split()) < 3:
                raise ValueError(f"{path.name}: {name}: give a reason of a few words")
            if name in allowed:
                raise ValueError(f"{path.name}: {name} stands here twice")
            allowed[name] = reason
    return allowed


def check(root: Path) -> list[str]:
    """Return a line for each dead definition, and for each entry of the list without need."""
    wheels, allowed = Wheels(root), read_allowed(root)
    roots = wheels.roots()
    live = wheels.live(roots, allowed)
    lines = _listed(wheels, live)
    for name in allowed:
        if not wheels.covered(name):
            lines.append(f"{ALLOWED}:1 {name}: there is no such definition: delete the entry")
        elif wheels.live(roots, [entry for entry in allowed if entry != name]) == live:
            lines.append(f"{ALLOWED}:1 {name}: is reached without the entry: delete it")
    return lines


def _listed(wheels: Wheels, live: set[str]) -> list[str]:
    """Return a line for each dead definition; a dead class or module includes its members."""
    dead = {d.dotted_name: d for d in wheels.definitions if d.dotted_name not in live}
    return [
        str(d)
        for d in sorted(dead.values(), key=lambda d: (d.path, d.line))
        if f"{d.module}.{d.owner}" not in dead and (not d.name or d.module not in dead)
    ]


def main() -> int:
    """Print the dead code of a tree; return the exit status."""
    parser = argparse.ArgumentParser(description="Print what nothing reaches in the wheels.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    arguments = parser.parse_args()
    try:
        lines = check(arguments.root)
    except (ValueError, SyntaxError) as error:
        print(f"dead: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(line)
    print(f"dead: {len(lines)} unreachable" if lines else "dead: nothing")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
