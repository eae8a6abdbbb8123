# SPDX-License-Identifier: Apache-2.0
"""The static gate: nothing in the tree runs code that a file, a peer or a flag brings.

What breaks it must be listed with a reason in `unsafe_allowed.toml`. Names are followed through
imports, so `import numpy as n; n.load(...)` is seen; what hides behind `getattr` is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from style_rules import Finding, Source, dotted, imported

UNSAFE_MODULES = frozenset(
    {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
)
#: Nothing that is installed opens archives: their members' names are paths.
ARCHIVES = frozenset({"tarfile", "zipfile"})

#: Calls that run code, or a shell, from data.
UNSAFE_CALLS = frozenset(
    ("eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen")
    + ("subprocess.getoutput", "subprocess.getstatusoutput", "torch.save", "shutil.unpack_archive")
    + ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all")
)
#: Calls that are safe with one keyword only.
NEEDED = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}
#: Keywords that must be off, wherever they are.
UNSAFE_KEYWORDS = frozenset({"trust_remote_code", "allow_pickle", "shell"})
#: Collectives of torch.distributed that pickle what they send.
UNSAFE_SUFFIXES = ("_object", "_object_list")


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Return what each imported name stands for, dotted."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _why(name: str, call: ast.Call, source: Source) -> str | None:
    """Say why a call is unsafe, or None."""
    if name.startswith("torch.distributed.") and name.endswith(UNSAFE_SUFFIXES):
        return f"{name} runs code from data: send tensors or JSON"
    if name in UNSAFE_CALLS:
        return f"{name} runs code from data: use JSON, safetensors, yaml.safe_load or a list"
    if name == "torch.load" and source.in_wheel:
        return f"{name} reads pickles: use safetensors"
    if name in NEEDED:
        keyword, value = NEEDED[name]
        given = {k.arg: k.value for k in call.keywords}.get(keyword)
        if not (isinstance(given, ast.Constant) and given.value is value):
            return f"{name} may run code from data: say {keyword}={value}"
    return None


def unsafe(source: Source) -> Iterator[Finding]:
    """Yield everything that could run code which data brings."""
    for module, line in imported(source.tree):
        top = module.split(".")[0]
        if top in UNSAFE_MODULES:
            text = f"{module} runs code from data: use JSON, safetensors or npy"
            yield Finding("unsafe", source.path, line, text)
        if top in ARCHIVES and source.in_wheel:
            text = f"{module}: archives are not opened"
            yield Finding("unsafe", source.path, line, text)
    aliases = _aliases(source.tree)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = dotted(node.func).partition(".")
        why = _why(aliases.get(first, first) + dot + rest, node, source)
        if why is not None:
            yield Finding("unsafe", source.path, node.lineno, why)
            continue
        for keyword in node.keywords:
            off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in UNSAFE_KEYWORDS and not off:
                text = f"{keyword.arg} lets data run code: leave it off"
                yield Finding("unsafe", source.path, node.lineno, text)
