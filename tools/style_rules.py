# SPDX-License-Identifier: Apache-2.0
"""The house style as rules over one parsed Python file; `style_check.py` runs them over the tree.

A rule is a generator of `Finding`s. Budgets (rules that measure something) report the measured
number, so that an exception in `budgets.toml` can name a higher limit; the other rules are allowed
or not.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

FILE_LINES, FUNCTION_LINES, KERNEL_LINES, PARAMETERS, CONFIG_FIELDS = 700, 60, 150, 8, 20
#: No exception may exceed these.
HARD_LIMITS = {"file-lines": 900, "function-lines": 100}

CORE = "megatron_core/megatron/core/"
WHEELS = ("megatron_core/megatron/", "megatron/")
EXPERIMENTS = "experimental"
BANNED_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})

CORE_DEPENDENCIES = frozenset({"torch", "numpy", "safetensors", "xxhash"})
#: Optional packages, and the files that alone may import each, by the end of their names (an op too
#: long for one file has several).
ADAPTERS = {
    "triton": ("/triton.py", "kernels.py"),
    "transformer_engine": ("/extensions/transformer_engine.py",),
}

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = frozenset(
    ("list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter")
    + ("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "ContextVar", "Lock", "RLock")
    + ("Generator", "count")
)
SCALARS = frozenset({"bool", "int", "float", "str", "None"})
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """One breach: `where` is the file, or file::qualified.name; `measured` is set by budgets."""

    rule: str
    where: str
    line: int
    message: str
    measured: int | None = None

    def __str__(self) -> str:
        return f"{self.where}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Source:
    """One file: its path relative to the root (forward slashes), its text and its tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def in_core(self) -> bool:
        return self.path.startswith(CORE)

    @property
    def in_wheel(self) -> bool:
        return self.path.startswith(WHEELS)

    def is_inside_op(self, name: str) -> bool:
        """Whether a top-level name is a part of an op that its package does not export."""
        path = PurePosixPath(self.path)
        if not self.in_core or not any(folder.name == "ops" for folder in path.parent.parents):
            return False
        exported = self.exported
        return path.stem != "__init__" or (exported is not None and name not in exported)

    @cached_property
    def exported(self) -> frozenset[str] | None:
        """The names in `__all__`; None without one."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
                return frozenset(ast.literal_eval(node.value))
        return None

    @property
    def is_test(self) -> bool:
        return "tests" in PurePosixPath(self.path).parts

    def functions(self) -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
        """Yield (qualified name, node, enclosing class or None) of every function, nested too."""
        yield from _functions(self.tree, "", None)


def _functions(
    node: ast.AST, prefix: str, owner: ast.ClassDef | None
) -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            name = f"{prefix}{child.name}"
            yield name, child, owner
            yield from _functions(child, f"{name}.", None)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", child)
        else:
            yield from _functions(child, prefix, owner)


def code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines of a source text that hold code: no docstring, comment or blank."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT)
    skipped += (tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)
    code_line_numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code_line_numbers.update(range(token.start[0], token.end[0] + 1))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            code_line_numbers.difference_update(
                range(docstring.lineno, (docstring.end_lineno or 0) + 1)
            )
    return len(code_line_numbers)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a name or a chain of attributes, else the empty string."""
    segments: list[str] = []
    while isinstance(node, ast.Attribute):
        segments.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(segments)])


def _decorators(node: Function | ast.ClassDef) -> list[str]:
    return [dotted(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]


def _is_kernel(node: Function) -> bool:
    return any(name.startswith("triton.") for name in _decorators(node))


def header(source: Source) -> Iterator[Finding]:
    """The licence line comes first, then a docstring; the file name names its content."""
    lines = source.text.splitlines()[:2]
    if lines and lines[0].startswith("#!"):
        lines = lines[1:]
    if not lines or lines[0] != "# SPDX-License-Identifier: Apache-2.0":
        yield Finding(
            "spdx", source.path, 1, "start the file with '# SPDX-License-Identifier: Apache-2.0'"
        )
    if not (ast.get_docstring(source.tree) or "").splitlines()[:1]:
        yield Finding(
            "docstring", source.path, 1, "say the one idea of this file in a module docstring"
        )
    path = PurePosixPath(source.path)
    for segment in (*path.parts[:-1], path.stem):
        if segment in BANNED_NAMES:
            yield Finding(
                "file-name", source.path, 1, f"{segment!r} names no idea: say which it is"
            )


def public_docstrings(source: Source) -> Iterator[Finding]:
    """Public classes and functions at the top level of a core module have docstrings."""
    if not source.in_core:
        return
    for node in source.tree.body:
        if (
            isinstance(node, (*Function.__args__, ast.ClassDef))
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            where = f"{source.path}::{node.name}"
            yield Finding(
                "docstring", where, node.lineno, "is public: say in a docstring what it does"
            )


def sizes(source: Source) -> Iterator[Finding]:
    """A file has at most 700 lines of code, a function 60 lines, a kernel 150 (no docstrings)."""
    lines = code_lines(source.text, source.tree)
    if lines > FILE_LINES:
        message = f"{lines} lines of code, over {FILE_LINES}"
        yield Finding("file-lines", source.path, 1, message, lines)
    for name, node, _ in source.functions():
        docstring = node.body[0]
        documented = ast.get_docstring(node, clean=False) is not None
        count = node.end_lineno - node.lineno + 1
        if documented:
            count -= docstring.end_lineno - docstring.lineno + 1
        limit = KERNEL_LINES if _is_kernel(node) else FUNCTION_LINES
        if count > limit:
            where = f"{source.path}::{name}"
            yield Finding(
                "function-lines", where, node.lineno, f"{count} lines, over {limit}", count
            )


def _is_scalar(annotation: ast.expr | None) -> bool:
    """Tell whether an annotation is made of bool, int, float, str and None only."""
    if annotation is None:
        return False
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _is_scalar(annotation.left) and _is_scalar(annotation.right)
    if isinstance(annotation, ast.Constant):
        return annotation.value is None or annotation.value in SCALARS
    return isinstance(annotation, ast.Name) and annotation.id in SCALARS


def _signature_is_given(node: Function, owner: ast.ClassDef | None) -> bool:
    """Tell whether somebody else decides this signature: autograd, Triton, Python's protocols."""
    if _is_kernel(node):
        return True
    if owner is None:
        return False
    if any(dotted(base).split(".")[-1] == "Function" for base in owner.bases):
        return True
    return node.name.startswith("__") and node.name not in ("__init__", "__call__")


def parameters(source: Source) -> Iterator[Finding]:
    """At most 8 parameters, self and cls not counted; those easily confused are keyword-only.

    In public functions of the wheels, keyword-only are: after the second parameter, every one that
    has a default or is a bool; after the third, every one annotated with int, float or str (or
    such a union with None). Required tensors and objects may be positional. The insides of an
    op (core/ops/<name>/, but for what the package's __all__ lists) are no public functions. Left
    out altogether: autograd.Function methods, Triton kernels, special methods except __init__ and
    __call__, and tests (whose parameters are fixtures).
    """
    if source.is_test:
        return
    for name, node, owner in source.functions():
        if _signature_is_given(node, owner):
            continue
        where, spec = f"{source.path}::{name}", node.args
        positional = [*spec.posonlyargs, *spec.args]
        defaults = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
        pairs = list(zip(positional, defaults, strict=True))
        if owner is not None and "staticmethod" not in _decorators(node):
            pairs = pairs[1:]
        count = len(pairs) + len(spec.kwonlyargs) + bool(spec.vararg) + bool(spec.kwarg)
        if count > PARAMETERS:
            yield Finding(
                "parameters", where, node.lineno, f"{count} parameters, over {PARAMETERS}", count
            )
        private = any(p.startswith("_") and not p.startswith("__") for p in name.split("."))
        if private or source.is_inside_op(name.split(".")[0]) or not source.in_wheel:
            continue
        for index, (argument, default) in enumerate(pairs[2:], start=3):
            flag = isinstance(argument.annotation, ast.Name) and argument.annotation.id == "bool"
            if default is not None or flag or (index > 3 and _is_scalar(argument.annotation)):
                text = f"make {argument.arg!r}, parameter {index}, keyword-only"
                yield Finding("keyword-only", where, node.lineno, text)


def configs(source: Source) -> Iterator[Finding]:
    """A dataclass named ...Config has at most 20 fields and is frozen and keyword-only."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
            continue
        if not any(name.endswith("dataclass") for name in _decorators(node)):
            continue
        where = f"{source.path}::{node.name}"
        fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
        if fields > CONFIG_FIELDS:
            text = f"{fields} fields, over {CONFIG_FIELDS}"
            yield Finding("config-fields", where, node.lineno, text, fields)
        calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
        on = {k.arg for d in calls for k in d.keywords if ast.unparse(k.value) == "True"}
        if not {"frozen", "kw_only"} <= on:
            text = "declare it dataclass(frozen=True, kw_only=True)"
            yield Finding("config-frozen", where, node.lineno, text)


def module_state(source: Source) -> Iterator[Finding]:
    """Core modules hold no mutable state: no containers at the top level, no `global`."""
    if not source.in_core:
        return
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [dotted(t) for t in targets] == ["__all__"]:
                continue
            value = node.value
            constructor = dotted(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
            if isinstance(value, MUTABLE_DISPLAYS) or constructor in MUTABLE_CALLS:
                text = (
                    "mutable module state: use a tuple, frozenset or MappingProxyType, or pass it"
                )
                yield Finding("module-state", source.path, node.lineno, text)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            text = (
                f"global {', '.join(node.names)}: keep the state in an object that is passed down"
            )
            yield Finding("module-state", source.path, node.lineno, text)


def core_calls(source: Source) -> Iterator[Finding]:
    """Core guesses no attributes and reads neither the environment nor the command line."""
    if not source.in_core:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name == "hasattr" or (name == "getattr" and len(node.args) > 2):
                text = f"{name} guesses: declare the attribute"
                yield Finding("attribute-guess", source.path, node.lineno, text)
        if isinstance(node, ast.Attribute) and dotted(node) in (
            "os.environ",
            "os.environb",
            "os.getenv",
            "os.putenv",
            "sys.argv",
        ):
            text = f"{dotted(node)}: entry scripts read it and pass the value down"
            yield Finding("environment", source.path, node.lineno, text)
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "sys"):
            for alias in node.names:
                if alias.name in ("environ", "environb", "getenv", "putenv", "argv"):
                    text = (
                        f"{node.module}.{alias.name}: entry scripts read it and pass the value down"
                    )
                    yield Finding("environment", source.path, node.lineno, text)


def asserted_comparisons(source: Source) -> Iterator[Finding]:
    """A test compares tensors before it asserts something of the result.

    pytest explains a comparison inside of a failing assert from both sides, element by element: of
    a tensor of millions, that takes minutes, and on a GPU hours.
    """
    if not source.is_test:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert) and any(_compared_for_a_call(node.test, False)):
            text = "a comparison inside of a call: compute it first, then assert the result"
            yield Finding("asserted-comparison", source.path, node.lineno, text)


def _compared_for_a_call(node: ast.expr, in_call: bool) -> Iterator[bool]:
    """Yield of each comparison that pytest would explain whether a call takes its result."""
    match node:
        case ast.Compare(left=left, comparators=comparators):
            yield in_call
            operands = [left, *comparators]
        case ast.Call(func=function, args=arguments, keywords=keywords):
            in_call = True
            operands = [function, *arguments, *(keyword.value for keyword in keywords)]
        case ast.Attribute(value=value) | ast.Starred(value=value):
            operands = [value]
        case ast.UnaryOp(operand=operand):
            operands = [operand]
        case ast.BinOp(left=left, right=right):
            operands = [left, right]
        case ast.BoolOp(values=values):
            operands = values
        case _:  # pytest does not look inside of anything else
            return
    for expression in operands:
        yield from _compared_for_a_call(expression, in_call)


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (dotted module, line) of every absolute import, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno


def dependencies(source: Source) -> Iterator[Finding]:
    """Core imports its four dependencies and, in one adapter each, optional packages."""
    if not source.in_core:
        return
    for module, line in imported(source.tree):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or top in CORE_DEPENDENCIES:
            continue
        if top == "megatron":
            if f"{module}.".startswith("megatron.core."):
                continue
            text = f"{module} stands above core: pass down what core needs"
            yield Finding("dependency", source.path, line, text)
            continue
        adapter = ADAPTERS.get(top)
        if adapter is None:
            text = (
                f"{top} is no dependency of megatron-core: use torch, numpy, safetensors or xxhash"
            )
            yield Finding("dependency", source.path, line, text)
        elif not source.path.endswith(adapter):
            text = f"{top} may only be imported in {' and '.join(adapter)}"
            yield Finding("dependency", source.path, line, text)


def documented_names(root: Path) -> dict[str, frozenset[str]]:
    """Return the names of the wheels that experiments may import, by module: those in the `__all__`
    of packages of core, and those in the tables of experimental/README.md."""
    names_by_page: dict[str, set[str]] = {}
    for file in (root / CORE).rglob("__init__.py"):
        module = ".".join(file.parent.relative_to(root / "megatron_core").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            listed = isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
            if listed and [dotted(target) for target in node.targets] == ["__all__"]:
                names_by_page.setdefault(module, set()).update(ast.literal_eval(node.value))
    readme = root / EXPERIMENTS / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    for module, names in re.findall(r"^\| `(megatron\.[\w.]+)` \| (.+) \|$", text, re.MULTILINE):
        names_by_page.setdefault(module, set()).update(re.findall(r"`(\w+)`", names))
    return {module: frozenset(names) for module, names in names_by_page.items()}


def experiment_imports(
    source: Source, documented: Mapping[str, frozenset[str]]
) -> Iterator[Finding]:
    """An experiment imports documented names of the wheels, and nothing of other experiments.

    Its tests may import more.
    """
    segments = PurePosixPath(source.path).parts
    if segments[0] != EXPERIMENTS or source.is_test:
        return
    own_package = f"{EXPERIMENTS}.{segments[1]}."
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            top = module.split(".")[0]
            if top == "megatron":
                wrong = name not in documented.get(module, ())
            else:
                wrong = top in ("tests", "tools") or (
                    top == EXPERIMENTS and not f"{module}.".startswith(own_package)
                )
            if wrong:
                text = (
                    f"{module} {name}".rstrip() + f": import names that {EXPERIMENTS}/README.md "
                    "lists, one by one, or add it there"
                )
                yield Finding("experiment-import", source.path, node.lineno, text)


RULES = (
    header,
    public_docstrings,
    sizes,
    parameters,
    configs,
    module_state,
    core_calls,
    asserted_comparisons,
    dependencies,
)
