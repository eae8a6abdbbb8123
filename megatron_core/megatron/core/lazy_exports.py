# SPDX-License-Identifier: Apache-2.0
"""Public names of a package that are imported when they are first used (PEP 562).

`import megatron.core.models` stays cheap, and `from megatron.core.models import GPTModel` works.
The names in a package's `__all__` are its public interface; a module's path inside the package may
change between releases. A package lists them once, as imports under `if TYPE_CHECKING:`. Type
checkers read these imports, and the first use of a name carries its import out:

    >>> __getattr__, __dir__, __all__ = lazy_exports("megatron.core")
    >>> __all__[:2]
    ['Backend', 'Group']
    >>> __getattr__("Group")
    <class 'megatron.core.process_groups.Group'>
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package.

    Public are the names that its `__init__` imports under `if TYPE_CHECKING:`, which are lazy, and
    the names that it imports from its own modules or as `Name as Name`.

    Args:
        package: the package's `__name__`.

    Raises:
        ValueError: a lazy name is also the name of its module: importing the module would replace
            the name in the package.
    """
    eager: set[str] = set()
    homes: dict[str, str] = {}
    source = pkgutil.get_data(package, "__init__.py")
    assert source is not None, f"{package} is installed without its source"
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom):
            module = str(statement.module)
            is_local = module.startswith(f"{package}.") and module != __name__
            eager |= {a.name for a in statement.names if is_local or a.asname == a.name}
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            imports = [line for line in statement.body if isinstance(line, ast.ImportFrom)]
            homes |= {alias.name: str(line.module) for line in imports for alias in line.names}
    if clashes := sorted(name for name, home in homes.items() if home == f"{package}.{name}"):
        raise ValueError(f"{package}: {', '.join(clashes)}: both a name and a module")
    exported = sorted(eager | homes.keys())

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    def list_attributes() -> list[str]:
        return exported

    return get_attribute, list_attributes, exported
