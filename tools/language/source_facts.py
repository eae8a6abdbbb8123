# SPDX-License-Identifier: Apache-2.0
"""Read the facts of one Python file for the figures: names, docstrings, imports, references.

The result is plain JSON, so that an unchanged file need not be parsed again.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

from tools.style_rules import code_lines

Facts = dict[str, Any]
#: Packages whose comments are counted: streams wait there, buffers are reused, orders matter.
HAZARDOUS = tuple(
    f"megatron_core/megatron/core/{name}/"
    for name in ("comm", "weight_gather", "distributed", "pipeline_parallel", "inference")
)
TEST_NAME_LENGTH = 60
PRONOUNS = re.compile(
    r"\b(that of|those of|what of|of what|by what|in what|those that|that which|what is|what it"
    r"|what they|what a|of which|than that|as that|what was|such a one|of these|of them|likewise)\b"
)
#: A back-quoted name, dotted name or path, of at least two characters; one may end in ().
REFERENCE = re.compile(r"(?<!`)`([A-Za-z_][\w.]*[\w/]|[\w.-]+/[\w./-]*[\w/])(?:\(\))?`(?!`)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def words_of(name: str) -> list[str]:
    """Return the words of a name in small letters: numHeads and num_heads have two."""
    return [w for w in re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower().split("_") if w]


def name_figures(name: str, words: Mapping[str, Mapping[str, str]], *, stored: bool) -> Iterator:
    """Yield (figure, term to use) of each list of `words.toml` that a bound name falls under.

    Args:
        name: the bound name.
        words: list name -> word -> term.
        stored: the name is an attribute that a statement assigns.
    """
    bare = name.strip("_").lower() if name != "all_" else name
    segments = words_of(name)
    for segment in segments:
        singular = segment if segment in words["private"] else segment.removesuffix("s")
        if singular in words["private"]:
            yield "never", words["private"][singular]
            return
    for figure in ("never", "counted", "empty"):
        if bare in words[figure]:
            yield figure, words[figure][bare]
    vague = {**words["never"], **words["counted"]}
    if stored and bare in vague:
        yield "attributes", vague[bare]
    if name.startswith("test_"):
        return  # a sentence
    inside = (
        bare if bare in vague else next((segment for segment in segments if segment in vague), None)
    )
    if inside:
        yield "inside", vague[inside]


def bound_names(node: ast.AST, path: str) -> Iterator[tuple[str, int, bool]]:
    """Yield (name, line, is a stored attribute) of the names that one node binds."""
    match node:
        case ast.Module():
            yield _module(path)[-1].removeprefix("test_"), 1, False
        case ast.Name(id=name, ctx=ast.Store()):
            yield name, node.lineno, False
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name, node.end_lineno or node.lineno, True
        case ast.arg(arg=name):
            yield name, node.lineno, False
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name, node.lineno, False
        case ast.ClassDef(name=name):
            yield name, node.lineno, False
        case ast.alias(asname=str(name)):
            yield name, node.lineno, False
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            yield name, node.lineno, False
        case ast.Call(func=ast.Name(id="dict" | "SimpleNamespace"), keywords=keywords):
            yield from ((k.arg, k.value.lineno, False) for k in keywords if k.arg)


def used_names(node: ast.AST) -> Iterator[str]:
    """Yield every name that one node binds, reads or quotes, for references to lead to."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=asname):
            yield from name.split(".")
            yield from [asname] if asname else []
        case ast.keyword(arg=str(name)):
            yield name
        case ast.Constant(value=str(text)) if not re.search(r"\s", text):
            yield from re.findall(r"\w+", text)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def references(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield (line, target) of the back-quoted names and paths in a text that starts at `line`."""
    for match in REFERENCE.finditer(text):
        yield line + text.count("\n", 0, match.start()), match[1]


def read_facts(path: str, text: str, words: Mapping[str, Mapping[str, str]]) -> Facts:
    """Return the facts of one Python file; `path` is relative to the root."""
    tree = ast.parse(text, filename=path)
    entries: list[list[Any]] = []  # [figure, line, text, term]
    bound = stored = docstrings = 0
    used: set[str] = set()
    variables: set[str] = set()
    references_: list[tuple[int, str]] = []
    imports: list[tuple[int, str, str | None]] = []
    for node in ast.walk(tree):
        used.update(used_names(node))
        if isinstance(node, (ast.Name, ast.arg)):
            variables.add(node.id if isinstance(node, ast.Name) else node.arg)
        for name, line, is_stored in bound_names(node, path):
            if name in ("self", "cls", "_"):
                continue
            bound, stored = bound + 1, stored + is_stored
            for figure, term in name_figures(name, words, stored=is_stored):
                entries.append([figure, line, name, term])
        if isinstance(node, DOCUMENTED) and node.body and _is_text(node.body[0]):
            docstrings += 1
            docstring, line = node.body[0].value.value, node.body[0].lineno
            for match in PRONOUNS.finditer(docstring.lower()):
                at = line + docstring.count("\n", 0, match.start())
                entries.append(["pronouns", at, match[0], "repeat the noun"])
            references_ += references(docstring, line)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*_module(path)[: -node.level], *filter(None, [base])])
            imports += [(node.lineno, base, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name, None) for alias in node.names]
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            entries += _test_name(node)
    facts: Facts = {"entries": entries, "bound": bound, "stored": stored, "docstrings": docstrings}
    hazardous = path.startswith(HAZARDOUS)
    if hazardous or re.search(r"#.*`", text):
        written = list(comments(text))
        for line, comment in written:
            references_ += references(comment, line)
        if hazardous:
            # Without the licence line.
            facts["comments"] = max(len(written) - 1, 0)
            facts["code"] = code_lines(text, tree)
    classes = [(n.name, n.lineno) for n in tree.body if isinstance(n, ast.ClassDef)]
    facts |= {"classes": classes, "imports": imports, "references": references_}
    return facts | {"used": sorted(used), "variables": sorted(variables)}


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _module(path: str) -> list[str]:
    """Return the segments of a file's dotted name, with `__init__`, so that levels count alike."""
    return path.removeprefix("megatron_core/").removesuffix(".py").split("/")


def _test_name(node: ast.FunctionDef) -> Iterator[list[Any]]:
    if len(node.name) > TEST_NAME_LENGTH:
        term = f"{len(node.name)} characters: name the behaviour in {TEST_NAME_LENGTH}"
        yield ["test_names", node.lineno, node.name, term]
    if re.match(r"test_rows?_\d", node.name):
        yield ["test_rows", node.lineno, node.name, "name the behaviour, not the row"]
