# SPDX-License-Identifier: Apache-2.0
"""The gatherer of an engine with a single kind of bucket."""

from __future__ import annotations

from megatron.core.distributed import DataParallel
from megatron.core.weight_gather import Gatherer


def gatherer_of(engine: DataParallel) -> Gatherer | None:
    """Return the only gatherer of an engine; None if it gathers nothing."""
    assert len(engine.gatherers) <= 1, "several gatherers: use engine.gatherers"
    return next(iter(engine.gatherers), None)
