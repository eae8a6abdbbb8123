# SPDX-License-Identifier: Apache-2.0
"""Weight gradients put off: the W half of a split backward.

While a queue is open on a store, backward computes input gradients only and leaves one item per
weight use here; a schedule drains them when it likes, first in first out. Gradients that are
already computed (norms, biases) go through the queue as well: put early, they would hold a whole
bucket open from I to W, and the summation order of a tied weight would change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Deferral:
    """What all handles of a store know about split backward.

    Args:
        queue: where puts wait at the moment; None runs them at once.
        splits: backward will be split: what an op could compute for a weight gradient before
            backward belongs behind it, with all that is put off.
    """

    queue: WgradQueue | None = None
    splits: bool = False


class WgradQueue:
    """First-in-first-out list of deferred gradient puts."""

    def __init__(self) -> None:
        self._items: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def push(self, put: Callable[[], None]) -> None:
        """Append a put; it must not keep an autograd graph alive (detach what it holds)."""
        self._items.append(put)

    def drain(self) -> None:
        """Carry out all puts in the order in which they were pushed."""
        while self._items:
            self._items.popleft()()
