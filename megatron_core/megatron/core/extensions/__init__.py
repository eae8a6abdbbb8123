# SPDX-License-Identifier: Apache-2.0
"""Backends built from other libraries, each in a module of its own that is imported on demand."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

#: The first release of TransformerEngine whose layers take weights that are gathered on demand.
OLDEST_TRANSFORMER_ENGINE = (2, 19)


def transformer_engine_problem() -> str | None:
    """Return why `extensions.transformer_engine` cannot be used, with the fix; None if it can.

    Imports it, which takes seconds where TransformerEngine is installed.
    """
    needed = ".".join(map(str, OLDEST_TRANSFORMER_ENGINE))
    install = "pip install 'megatron-lm[te]'"
    try:
        release = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return f"TransformerEngine is not installed: {install} (>= {needed})"
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers < OLDEST_TRANSFORMER_ENGINE:
        return f"TransformerEngine {release} has no distributed weights: {install} (>= {needed})"
    try:
        importlib.import_module("megatron.core.extensions.transformer_engine")
        # TE looks for a GPU when a layer is built.
        importlib.import_module("transformer_engine.pytorch").Linear(16, 16, device="meta")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return f"TransformerEngine {release} cannot be used ({reason}): {install} on a GPU machine"
    return None
