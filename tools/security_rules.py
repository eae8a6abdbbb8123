# SPDX-License-Identifier: Apache-2.0
"""Static security rules: no code of the tree runs code from a file, a peer or a flag, and installed
code opens files only through `megatron.core.untrusted_files`.

Exceptions must be listed with a reason in `unsafe_allowed.toml`. Names are resolved through
imports, so `import numpy as n; n.load(...)` is found; uses of `getattr` are not.
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
#: The one installed module that opens files by path, and what others would do that with.
FILES = "megatron_core/megatron/core/untrusted_files.py"
FILE_CALLS = frozenset(
    ("open", "builtins.open", "io.open", "io.FileIO", "os.open", "os.truncate")
    + ("codecs.open", "tokenize.open", "gzip.open", "bz2.open", "lzma.open", "json.load")
    + ("numpy.fromfile", "numpy.save", "numpy.savez", "numpy.savetxt", "numpy.loadtxt")
    + ("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move")
    + ("safetensors.safe_open", "safetensors.torch.load_file", "safetensors.torch.save_file")
)
PATH_METHODS = frozenset({"read_text", "write_text", "write_bytes"})
#: What tells `Path.open` from other methods of that name.
OPEN_KEYWORDS = frozenset({"mode", "encoding", "errors", "newline", "buffering"})
MODE_LETTERS = frozenset("rwxabt+")

#: Collectives of torch.distributed that pickle what they send.
UNSAFE_SUFFIXES = ("_object", "_object_list")


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call with its function's dotted name, resolved through the imports."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            package, dot, attribute = dotted(node.func).partition(".")
            yield node, aliases.get(package, package) + dot + attribute


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
        argument = {k.arg: k.value for k in call.keywords}.get(keyword)
        if not (isinstance(argument, ast.Constant) and argument.value is value):
            return f"{name} may run code from data: say {keyword}={value}"
    return None


def _opens_a_file(name: str, call: ast.Call) -> bool:
    """Tell whether a call opens a file by its path."""
    if name == "os.open":  # a folder's handle, and the null device, lead nowhere else
        words = {dotted(node) for argument in call.args for node in ast.walk(argument)}
        return not words & {"os.O_DIRECTORY", "os.devnull"}
    if name == "numpy.memmap":
        modes = [k.value for k in call.keywords if k.arg == "mode"]
        return not any(
            isinstance(mode, ast.Constant) and mode.value in ("r", "c") for mode in modes
        )
    if name in FILE_CALLS:
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "open":
        file_name = (
            call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        )
        is_mode = (
            isinstance(file_name, str) and 0 < len(file_name) < 4 and set(file_name) <= MODE_LETTERS
        )
        return is_mode or any(k.arg in OPEN_KEYWORDS for k in call.keywords)
    bare = not call.args and not call.keywords
    return call.func.attr in PATH_METHODS or (call.func.attr == "read_bytes" and bare)


def plain_files(source: Source) -> Iterator[Finding]:
    """Yield everything installed that opens a file without asking what lies there."""
    if not source.in_wheel or source.path == FILES:
        return
    for call, name in _calls(source.tree):
        if _opens_a_file(name, call):
            text = "a file of a stranger may be a link, a pipe or endless: open it with "
            text += "megatron.core.untrusted_files"
            yield Finding("plain-file", source.path, call.lineno, text)


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
    for call, name in _calls(source.tree):
        why = _why(name, call, source)
        if why is not None:
            yield Finding("unsafe", source.path, call.lineno, why)
            continue
        for keyword in call.keywords:
            off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in UNSAFE_KEYWORDS and not off:
                text = f"{keyword.arg} lets data run code: leave it off"
                yield Finding("unsafe", source.path, call.lineno, text)
