# SPDX-License-Identifier: Apache-2.0
"""A collective under way: what it reads and writes, how it starts, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import Work

from megatron.core.process_groups import Group


class Underway(Protocol):
    """What started a transfer; `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Block until the transfer is done (on a GPU: make the current stream wait for it)."""


@dataclass(slots=True)
class Transfer:
    """A collective that is about to start.

    Args:
        kind: of its record.
        source: what it reads; None if that is the output, as in an all-reduce.
        output: what it overwrites.
        start: starts the real collective on what `source` holds at that time.
        keeps_source: where input and output overlap, the input's values stay (a gather in place).
        prompt: it cannot be put off: its peer may wait for it before this rank does.
    """

    kind: str
    group: Group
    source: torch.Tensor | None
    output: torch.Tensor
    start: Callable[[], Underway]
    keeps_source: bool = False
    prompt: bool = False

    def launch(self) -> Underway:
        """Start it: on the last of the group's `links` if there is any, else on its handle."""
        links = self.group.links
        return links[-1](self) if links else self.start()


@dataclass
class Pending:
    """A collective under way; `wait()` returns its output and may be called again.

    `source` keeps the input alive and untouched until the transfer is done. Each of `waits` is
    entered while the caller waits for that. `finish`, if any, is applied to the output once, after
    the transfer, and what it returns is the output from then on.
    """

    output: torch.Tensor
    work: Underway | None = None
    source: torch.Tensor | None = None
    waits: tuple[AbstractContextManager[object], ...] = ()
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def wait(self) -> torch.Tensor:
        """Block until the output is valid (on a GPU: until the current stream may read it)."""
        if self.work is not None:
            if len(self.waits) == 1:  # the usual number; a stack costs more than all the rest
                with self.waits[0]:
                    self.work.wait()
            elif self.waits:
                with ExitStack() as stack:
                    for context in self.waits:
                        stack.enter_context(context)
                    self.work.wait()
            else:
                self.work.wait()
            self.work = self.source = None
        if self.finish is not None:
            finish, self.finish = self.finish, None
            self.output = finish(self.output)
        return self.output

    def is_done(self) -> bool:
        """Return whether the transfer is over, without waiting; CPU transfers know in `wait()`."""
        return self.work is None or (isinstance(self.work, Work) and self.work.is_completed())

    def then(self, finish: Callable[[torch.Tensor], torch.Tensor]) -> Pending:
        """Apply `finish` to the output, after what was asked for earlier, when it is waited for.

        Returns this object, whose `wait()` returns what `finish` does.
        """
        before = self.finish
        self.finish = finish if before is None else lambda output: finish(before(output))
        return self
