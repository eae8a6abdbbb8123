# SPDX-License-Identifier: Apache-2.0
"""torch's own record of collectives, which on a GPU knows what has really begun and ended there.

It is kept where the environment asks for it before process groups are made, and is read as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

#: How many collectives torch keeps; the second name is that of older versions.
SIZE_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

#: What is asked for where the user has said nothing.
SIZE = 2000


def ask_for_record(environment: MutableMapping[str, str]) -> None:
    """Have torch keep its record, unless the environment says how much to keep."""
    if not any(name in environment for name in SIZE_NAMES):
        environment[SIZE_NAMES[0]] = str(SIZE)


def is_kept(environment: MutableMapping[str, str]) -> bool:
    """Return whether the environment asks for the record."""
    return any(environment.get(name, "0") not in ("", "0") for name in SIZE_NAMES)


def read_record(bindings: Any) -> bytes | None:
    """Return the record as JSON; None if this torch has none.

    Args:
        bindings: `torch._C._distributed_c10d`, of which versions differ in what they offer.
    """
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump: Callable[[], bytes | str] | None = getattr(bindings, name, None)
        if dump is not None:
            found = dump()
            return found.encode() if isinstance(found, str) else bytes(found)
    return None
