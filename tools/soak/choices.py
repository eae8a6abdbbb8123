# SPDX-License-Identifier: Apache-2.0
"""The runs and kills of a soak, drawn from a seed, independent of clock and disk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

How = Literal["KILL", "TERM", "TERM+KILL", "STOP+KILL"]
Moment = Literal["start", "training", "save", "commit"]


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """A kind of run.

    Args:
        name: short.
        layout: flags that its numbers depend on.
        saving: flags that they do not depend on.
    """

    name: str
    layout: str
    saving: str

    @property
    def asynchronous(self) -> bool:
        """Whether it saves in the background."""
        return "--async-save" in self.saving


ZERO3 = (
    "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
    "--overlap-param-gather --bf16"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"

#: One half saves in the background; each half once with and once without retention.
FLAVOURS = (
    Flavour(name="dp", layout="--eval-interval 5 --eval-iters 1", saving="--save-keep-last 2"),
    Flavour(name="zero3 async", layout=ZERO3, saving="--async-save"),
    Flavour(name="tp2", layout=TP2, saving=""),
    Flavour(
        name="dp async",
        layout="--use-distributed-optimizer --eval-interval 5 --eval-iters 1",
        saving="--async-save --save-keep-last 2",
    ),
)
#: Chains in the background come twice as often, as they are at their end after half the kills.
ORDER = (0, 1, 3, 2, 1, 3)


def flavour_of(chain: int, names: Sequence[str] = ()) -> Flavour:
    """Return the flavour of a chain.

    Args:
        chain: number of the chain, from 1.
        names: names of the selected flavours; all if empty.
    """
    order = [i for i in ORDER if not names or FLAVOURS[i].name in names]
    return FLAVOURS[order[(chain - 1) % len(order)]]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The plan of one kill.

    Args:
        victim: "all", "launcher" (which ranks outlive), "rank 1", "writer 1" (the process that
            writes that rank's saves), or "machine": all processes, and unsynced data is lost.
        how: signals, in order.
        moment: reference time of the kill: the start of the processes, the first step after it,
            the begin of a save, or its manifest.
        skip: number of saves, or of intervals between saves, before the kill.
        offset: delay after `moment`, as a fraction of the measured duration of a start, of the
            interval between saves, of a save, or of the commit after its manifest.
        delay: time between two signals, as a fraction of the maximum.
        launcher: whether the launcher stops the survivors; otherwise they detect the death
            themselves.
    """

    victim: str
    how: How
    moment: Moment
    skip: int
    offset: float
    delay: float
    launcher: bool = True

    @property
    def of_writer(self) -> bool:
        """Whether trainers live on."""
        return self.victim.startswith("writer")

    @property
    def of_launcher(self) -> bool:
        """Whether ranks have to find out by themselves, save and stop."""
        return self.victim == "launcher"

    @property
    def of_machine(self) -> bool:
        """Whether it is a power cut."""
        return self.victim == "machine"


def choose(seed: str, *, ranks: int, asynchronous: bool) -> Kill:
    """Return the kill that belongs to a seed.

    Args:
        ranks: how many there are.
        asynchronous: whether there are writer processes to kill.
    """
    draw = random.Random(seed)
    victims = ["all", "machine", "launcher", "rank 0", f"rank {draw.randrange(ranks)}"]
    if asynchronous:
        victims.append(f"writer {draw.randrange(ranks)}")
    victim = draw.choice(victims)
    hows: list[How] = ["KILL", "TERM", "TERM+KILL", "STOP+KILL"]
    (how,) = draw.choices(hows, weights=[76, 6, 9, 9])
    moments: list[Moment] = ["start", "training", "save", "commit"]
    (moment,) = draw.choices(moments, weights=[8, 37, 40, 15])
    kill = Kill(
        victim=victim,
        how=how,
        moment=moment,
        skip=draw.choice([0, 0, 1, 2]),
        offset=draw.random(),
        delay=draw.random(),
        launcher=draw.random() < 0.7,
    )
    if kill.of_writer:  # it ignores SIGTERM, and is not there before the first step
        return replace(kill, how="KILL", moment="save")
    if kill.of_machine or kill.of_launcher:  # SIGTERM to a launcher is SIGTERM to all ranks
        return replace(kill, how="KILL")
    return kill
