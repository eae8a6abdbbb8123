# SPDX-License-Identifier: Apache-2.0
"""Print unreachable modules, functions, classes, methods and constants of the two wheels.

    python tools/dead_code.py [--root DIR] [--tools-only]

A static walk over imports, definitions and references. It starts at the roots and follows what live
code mentions; a definition that it never meets is dead, also where other dead code mentions it.
Prints `path:line qualified.name` for each, and exits 1 if there is any that `dead_allowed.toml`
does not list, or an entry there that nothing needs.

Roots:
    1. modules that run as a program: `if __name__ == "__main__"`, or a script of a pyproject.toml;
    2. a name in the `__all__` of a package which README.md or docs/*.md documents: a code span that
       is the name or a call of it, or a Python code block with it in it. An entry in `__all__`
       or a docstring is no use. An import in a Python code block is a use like an import in code,
       and a module that is named in full, as in `megatron.core.models.hybrid`, is public as a whole
       unless it is a package or a program;
    3. names that tools/ and experimental/ mention. Tests never count. `--tools-only` prints the
       definitions that only they keep alive;
    4. the entries of dead_allowed.toml, each with a reason: a definition, a module or a package,
       whose definitions are then all roots.

Uses: a name, resolved through imports and re-exports of packages, is a use of the definition,
unless a function binds the name itself; an import is a use of the module only. A method
lives where its class does and live code has an attribute or a string of its name, whatever the
object: in doubt a method is live. Special methods live with their class, and so do overrides of
methods that a library calls (`LIBRARY_CALLS`) if a base class is foreign. Names in nested functions
are not looked into; kernels are reached by their names in `kernel[grid](...)`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Folder of the modules that are checked -> folder that their dotted names begin behind.
WHEELS = {
    "megatron_core/megatron/core": "megatron_core",
    "megatron/training": ".",
    "megatron/inference": ".",
    "megatron/hf": ".",
    "megatron/cli": ".",
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
Key = tuple[str, str]  #: (module, qualified name in it); ("megatron.core.comm", "") is the module.


@dataclass
class Uses:
    """What one piece of code mentions: definitions, and names of attributes."""

    names: set[Key] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


@dataclass
class Definition:
    """One module, function, class, method or constant, and the names that its code mentions."""

    key: Key
    path: str
    line: int
    uses: Uses
    #: The class of a method, and whether the class alone keeps the method alive.
    owner: Key | None = None
    with_owner: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {dotted_name(self.key)}"


@dataclass
class Module:
    """One parsed file: its imports, and its definitions by qualified name."""

    name: str
    path: str
    tree: ast.Module
    is_package: bool
    #: Local name -> what it may stand for: (module, name), or (module, "") of a module.
    imports: dict[str, set[Key]] = field(default_factory=lambda: defaultdict(set))
    imported: set[str] = field(default_factory=set)
    definitions: dict[str, Definition] = field(default_factory=dict)
    exports: tuple[str, ...] = ()


def dotted_name(key: Key) -> str:
    """Return the name of a definition as one would import it."""
    return ".".join(segment for segment in key if segment)


def read_module(path: Path, root: Path, base: Path) -> Module:
    """Parse one file; `base` is the folder that its dotted name begins behind."""
    segments = list(path.relative_to(base).with_suffix("").parts)
    is_package = segments[-1] == "__init__"
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    name = ".".join(segments[:-1] if is_package else segments)
    module = Module(name, path.relative_to(root).as_posix(), tree, is_package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                module.imports[local].add((alias.name if alias.asname else local, ""))
                module.imported.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module.imported.add(node.module)
            for alias in node.names:
                module.imports[alias.asname or alias.name].add((node.module, alias.name))
                module.imported.add(f"{node.module}.{alias.name}")
    return module


def top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, and those in its if, try and with statements."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from top_level(handler.body)
        yield node


def constants(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top of a module assigns."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    names = [t.id for t in targets if isinstance(t, ast.Name)]
    return [name for name in names if not (name.startswith("__") and name.endswith("__"))]


class Walk(ast.NodeVisitor):
    """Collect the names that code mentions, without the names in `skipped` nodes."""

    def __init__(self, wheels: Wheels, module: Module, skipped: frozenset[ast.AST]) -> None:
        self._wheels, self._module, self._skipped = wheels, module, skipped
        self._bound: list[set[str]] = []
        self.uses = Uses()

    def visit(self, node: ast.AST) -> None:
        if node not in self._skipped:
            super().visit(node)

    def visit_FunctionDef(self, node: Function) -> None:
        arguments = node.args
        for outside in [*node.decorator_list, *arguments.defaults, *arguments.kw_defaults]:
            if outside is not None:
                self.visit(outside)
        for annotation in [a.annotation for a in ast.walk(arguments) if isinstance(a, ast.arg)]:
            if annotation is not None:
                self.visit(annotation)
        if node.returns is not None:
            self.visit(node.returns)
        self._bound.append(_bound_names(node))
        for statement in _without_docstring(node.body):
            self.visit(statement)
        self._bound.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for expression in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(expression)
        for statement in _without_docstring(node.body):
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not any(node.id in names for names in self._bound):
            self.uses.names |= self._wheels.meant(self._module, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain: list[str] = [node.attr]
        inner = node.value
        while isinstance(inner, ast.Attribute):
            chain.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and not any(inner.id in names for names in self._bound):
            self.uses.names |= self._wheels.meant(self._module, inner.id, chain)
        if not isinstance(node.ctx, ast.Store):
            self.uses.attributes.add(node.attr)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.uses.attributes.update(re.findall(r"[A-Za-z_]\w*", node.value)[:1])
            self.uses.names |= {(name, "") for name in re.findall(r"megatron[\w.]+", node.value)}
            for name, what in re.findall(r"from (megatron[\w.]+) import (\w+)", node.value):
                self.uses.names |= self._wheels.resolve(name, what)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    statement = body[0] if body else None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return body[1:]
    return body


def _bound_names(node: Function) -> set[str]:
    """Return the names that a function binds: arguments and assigned names."""
    bound = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    outer: set[str] = set()
    pending: list[ast.AST] = list(node.body)
    while pending:
        inner = pending.pop()
        if isinstance(inner, Function | ast.ClassDef):
            bound.add(inner.name)
            continue
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            bound.add(inner.id)
        elif isinstance(inner, ast.Global | ast.Nonlocal):
            outer.update(inner.names)
        pending.extend(ast.iter_child_nodes(inner))
    return bound - outer


class Wheels:
    """The modules of both wheels, their definitions, and the roots among them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for folder, base in WHEELS.items():
            for path in sorted((root / folder).rglob("*.py")):
                module = read_module(path, root, root / base)
                self.modules[module.name] = module
        for module in self.modules.values():
            self._list(module)
        for module in self.modules.values():
            self._define(module)
        self.definitions = {
            d.key: d for module in self.modules.values() for d in module.definitions.values()
        }
        self._documented = self._read_documents()

    def resolve(self, module: str, name: str, *, depth: int = 0) -> set[Key]:
        """Return the definitions that `from module import name` gives."""
        home = self.modules.get(module)
        if home is not None and name in home.definitions:
            return {(module, name)}
        if home is not None and name in home.imports and depth < 8:
            return {
                key
                for source, what in home.imports[name]
                for key in (self.resolve(source, what, depth=depth + 1) if what else {(source, "")})
            }
        return {(f"{module}.{name}", "")} if f"{module}.{name}" in self.modules else set()

    def meant(self, module: Module, name: str, chain: Iterable[str] = ()) -> set[Key]:
        """Return the definitions to which `name` or `name.chain` resolves in a module."""
        if name in module.definitions:
            keys = {(module.name, name)}
        else:
            keys = set()
            for source, what in module.imports.get(name, ()):
                keys |= self.resolve(source, what) if what else {(source, "")}
        for attribute in chain:
            packages = {key[0] for key in keys if not key[1]}
            keys = {
                key
                for package in packages
                for key in self.resolve(package, attribute) or {(f"{package}.{attribute}", "")}
            }
        return {key for key in keys if key[1] or key[0] in self.modules}

    def _list(self, module: Module) -> None:
        """List the definitions of a module, without their uses."""
        module.definitions[""] = Definition((module.name, ""), module.path, 1, Uses())
        for node in top_level(module.tree.body):
            if isinstance(node, Function | ast.ClassDef):
                names = [node.name]
            else:
                names = constants(node)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    module.exports = tuple(_strings(node.value)) or ("*",)
            for name in names:
                if not re.fullmatch(r"__\w+__", name):
                    module.definitions[name] = Definition(
                        (module.name, name), module.path, node.lineno, Uses()
                    )

    def _define(self, module: Module) -> None:
        """Find what each definition of a module mentions, and list methods."""
        names_by_statement: dict[ast.stmt, list[str]] = {}
        for node in top_level(module.tree.body):
            names = [node.name] if isinstance(node, Function | ast.ClassDef) else constants(node)
            if names and names[0] in module.definitions:
                names_by_statement[node] = names
        for node, names in names_by_statement.items():
            methods: list[Function] = []
            if isinstance(node, ast.ClassDef):
                methods = [m for m in top_level(node.body) if isinstance(m, Function)]
            uses = self.uses(module, node, methods)
            for name in names:
                definition_uses = module.definitions[name].uses
                definition_uses.names |= uses.names
                definition_uses.attributes |= uses.attributes
            if isinstance(node, ast.ClassDef):
                self._define_methods(module, node, methods)
        body = ast.Module(_without_docstring(module.tree.body), [])
        module.definitions[""].uses = self.uses(module, body, names_by_statement)

    def _define_methods(self, module: Module, owner: ast.ClassDef, methods: list[Function]) -> None:
        of_library = self._has_foreign_base(module, owner)
        for method in methods:
            key = (module.name, f"{owner.name}.{method.name}")
            uses = self.uses(module, method, [])
            if key[1] in module.definitions:  # an overload, or the setter of a property
                uses.names |= module.definitions[key[1]].uses.names
                uses.attributes |= module.definitions[key[1]].uses.attributes
            called = bool(re.fullmatch(r"__\w+__", method.name))
            called |= of_library and method.name in LIBRARY_CALLS
            called |= of_library and method.name.startswith(("visit_", "do_"))
            module.definitions[key[1]] = Definition(
                key, module.path, method.lineno, uses, (module.name, owner.name), called
            )

    def _has_foreign_base(self, module: Module, owner: ast.ClassDef) -> bool:
        for base in owner.bases:
            walk = Walk(self, module, frozenset())
            walk.visit(base)
            wheel_bases = [key for key in walk.uses.names if key[1]]
            if not wheel_bases:
                return True
            for name, what in wheel_bases:
                home = self.modules[name]
                classes = [n for n in top_level(home.tree.body) if isinstance(n, ast.ClassDef)]
                if any(self._has_foreign_base(home, n) for n in classes if n.name == what):
                    return True
        return False

    def uses(self, module: Module, node: ast.AST, skipped: Iterable[ast.AST]) -> Uses:
        """Return the names that a node of a module mentions."""
        walk = Walk(self, module, frozenset(skipped))
        walk.visit(node)
        return walk.uses

    def _read_documents(self) -> Uses:
        """Return what documents use."""
        uses, words = Uses(), set[str]()
        for pattern in DOCUMENTS:
            for path in sorted(self.root.glob(pattern)):
                text = path.read_text(encoding="utf-8")
                blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
                spans = re.findall(
                    r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
                )
                for span in spans:
                    if called := re.fullmatch(r"(?:\w+\.)*(\w+)(?:\(.*\))?", span):
                        words.add(called[1])
                for code in [*spans, *(code for _, code in blocks)]:
                    uses.attributes.update(re.findall(r"\.([A-Za-z_]\w*)", code))
                    for name in re.findall(r"\bmegatron(?:\.\w+)+", code):
                        uses.names |= self._named_in_full(name)
                for language, code in blocks:
                    if language == "python":
                        words.update(re.findall(r"\w+", code))
                        uses.names |= self._imports_of(code)
        for module in self.modules.values():
            if module.is_package and module.exports:
                names = words if module.exports == ("*",) else words & set(module.exports)
                for name in names:
                    uses.names |= self.resolve(module.name, name)
        return uses

    def _named_in_full(self, name: str) -> set[Key]:
        """Return the definitions that a dotted name in a document means; a module means all."""
        module = self.modules.get(name)
        if module is None:
            return self.resolve(*name.rpartition(".")[::2])
        if module.is_package or _is_program(module):
            return {(name, "")}
        return {key for key in self.covered(name) if not re.search(r"(^|\.)_", key[1])}

    def _imports_of(self, code: str) -> set[Key]:
        try:
            tree = ast.parse(code)
        except SyntaxError:  # a fragment
            return set()
        return {
            key
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            for key in self.resolve(node.module, alias.name)
        }

    def roots(self, *, with_users: bool) -> Uses:
        """Return the names in programs, documents and optionally tools and experiments."""
        root_uses = Uses(set(self._documented.names), set(self._documented.attributes))
        scripts = " ".join(
            path.read_text(encoding="utf-8")
            for path in [self.root / "pyproject.toml", self.root / "megatron_core/pyproject.toml"]
            if path.is_file()
        )
        for module in self.modules.values():
            if _is_program(module):
                root_uses.names.add((module.name, ""))
            for function in re.findall(rf'"{re.escape(module.name)}:(\w+)"', scripts):
                root_uses.names.add((module.name, function))
        for folder in USERS if with_users else ():
            for path in sorted((self.root / folder).rglob("*.py")):
                if "tests" in path.relative_to(self.root).parts:
                    continue
                user = read_module(path, self.root, self.root)
                uses = self.uses(user, user.tree, [])
                root_uses.names |= uses.names | self._modules_of(user)
                root_uses.attributes |= uses.attributes
        return root_uses

    def _modules_of(self, module: Module) -> set[Key]:
        """Return the modules that a module imports."""
        return {(name, "") for name in module.imported if name in self.modules}

    def covered(self, entry: str) -> list[Key]:
        """Return the definitions that an entry of the list names: one, or all of a module."""
        if entry in self.modules:
            return [
                key for key in self.definitions if key[0] == entry or key[0].startswith(f"{entry}.")
            ]
        return [key for key in self.definitions if dotted_name(key) == entry]

    def live(self, roots: Uses, entries: Iterable[str]) -> set[Key]:
        """Return every definition that is reached from roots and from entries of the list."""
        live_keys = {key for entry in entries for key in self.covered(entry)}
        pending = list(roots.names | live_keys)
        attributes, live = set(roots.attributes), set[Key]()
        by_owner: dict[Key, list[Definition]] = defaultdict(list)
        waiting: dict[str, list[Definition]] = defaultdict(list)
        for definition in self.definitions.values():
            if definition.owner is not None:
                by_owner[definition.owner].append(definition)
        while pending:
            key = pending.pop()
            definition = self.definitions.get(key)
            if definition is None or key in live:
                continue
            live.add(key)
            if key[1]:
                pending.append((key[0], ""))  # a definition runs its module
            else:
                pending.append((key[0].rpartition(".")[0], ""))  # and that, its package
                pending.extend(self._modules_of(self.modules[key[0]]))
            if definition.owner is not None:
                pending.append(definition.owner)
            pending.extend(definition.uses.names)
            for method in by_owner.get(key, ()):
                name = method.key[1].rpartition(".")[2]
                if method.with_owner or name in attributes:
                    pending.append(method.key)
                else:
                    waiting[name].append(method)
            for name in definition.uses.attributes - attributes:
                pending.extend(method.key for method in waiting.pop(name, ()))
            attributes |= definition.uses.attributes
        return live


def _is_program(module: Module) -> bool:
    tests = [node.test for node in module.tree.body if isinstance(node, ast.If)]
    return any(ast.unparse(test) == "__name__ == '__main__'" for test in tests)


def _strings(node: ast.AST) -> list[str]:
    return [
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]


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
    roots = wheels.roots(with_users=True)
    live = wheels.live(roots, allowed)
    lines = _listed(wheels, live)
    for name in allowed:
        other_names = [allowed_name for allowed_name in allowed if allowed_name != name]
        if not wheels.covered(name):
            lines.append(f"{ALLOWED}:1 {name}: there is no such definition: delete the entry")
        elif len(wheels.live(roots, other_names)) == len(live):
            lines.append(f"{ALLOWED}:1 {name}: is reached without the entry: delete it")
    return lines


def tools_only(root: Path) -> list[str]:
    """Return a line for each definition that only tools and experiments reach."""
    wheels, allowed = Wheels(root), read_allowed(root)
    with_users = wheels.live(wheels.roots(with_users=True), allowed)
    without = wheels.live(wheels.roots(with_users=False), allowed)
    return _listed(wheels, set(wheels.definitions) - (with_users - without))


def _listed(wheels: Wheels, live: set[Key]) -> list[str]:
    """Return a line for each dead definition; a dead class or module includes its members."""
    dead = [d for key, d in wheels.definitions.items() if key not in live]
    keys = {d.key for d in dead}
    return [
        str(d)
        for d in sorted(dead, key=lambda d: (d.path, d.line))
        if d.owner not in keys and (not d.key[1] or (d.key[0], "") not in keys)
    ]


def main() -> int:
    """Print the dead code of a tree; return the exit status."""
    parser = argparse.ArgumentParser(description="Print what nothing reaches in the wheels.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--tools-only", action="store_true", help="print what only tools reach")
    arguments = parser.parse_args()
    if arguments.tools_only:
        print("\n".join(tools_only(arguments.root)))
        return 0
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
