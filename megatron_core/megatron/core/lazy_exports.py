# SPDX-License-Identifier: Apache-2.0
"""Public names of a package that are imported when they are first used (PEP 562).

`import megatron.core.models` stays cheap, and `from megatron.core.models import GPTModel` works.
The names in a package's `__all__` are its public interface; a module's path inside the package may
change between releases. A package assigns what `lazy_exports` returns, and repeats the imports
under `if TYPE_CHECKING:` for type checkers; a test compares the two:

    >>> __getattr__, __dir__, __all__ = lazy_exports("megatron.core", {"boxes": ("Box", "tiles")})
    >>> __all__
    ['Box', 'tiles']
    >>> __getattr__("Box")
    <class 'megatron.core.boxes.Box'>
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]], *, eager: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package with lazy names.

    Args:
        package: the package's `__name__`.
        modules: the public names of each module, keyed by the module's path below the package
            ("gpt", "reader.manifest").
        eager: public names that the package itself imports.

    Raises:
        ValueError: two modules export one name, or a name is also a module's name: importing the
            module would replace the name in the package.
    """
    homes: dict[str, str] = dict.fromkeys(eager, "the package")
    for module, names in modules.items():
        for name in names:
            if name in homes:
                raise ValueError(f"{package}: {homes[name]} and {module} both export {name}")
            homes[name] = module
    if clashes := homes.keys() & modules.keys():
        raise ValueError(f"{package}: {', '.join(sorted(clashes))}: both a name and a module")
    exported = sorted(homes)
    lazy = homes.keys() - set(eager)

    def get_attribute(name: str) -> Any:
        if name not in lazy:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def list_attributes() -> list[str]:
        return exported

    return get_attribute, list_attributes, exported
