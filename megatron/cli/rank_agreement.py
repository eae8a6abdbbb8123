# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of a run were started alike, found out before any process group exists.

With one launch script on every machine it is easy to give one rank another option, another
installation or another copy of the data. Ranks that differ in shapes or in the number of steps
crash in a collective; ranks that differ in a learning rate or a seed go on, and train another model
than either was asked for. So the ranks compare digests over the store that they share, and if the
digests differ, one line names what differs, with the values and the ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from megatron.cli.errors import PeerLost
from megatron.cli.schema import flatten

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import Coordinator

#: Differences that the line names; it counts the others.
MOST_NAMED = 6

#: Groups of ranks that started alike whose values are compared.
_MOST_GROUPS = 8

_PACKAGES = ("torch", "megatron-core", "megatron-lm")


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """What a rank was started with. All ranks of a run must have the same `values`.

    Args:
        values: by name, as shown to the user.
        before_resolving: options that were not derived yet, by the names they have in `values`. A
            derived option that differs is not named if another option explains the difference.
    """

    values: Mapping[str, str]
    before_resolving: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Equal for equal values."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()


def option_values(config: object, *, leave_out: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a schema's object by flag, as text.

    Args:
        leave_out: options that may differ between ranks, by name without dashes.
    """
    return {
        f"--{name}": _text(value)
        for name, value in flatten(config).items()
        if name not in leave_out
    }


def versions() -> dict[str, str]:
    """Return the versions of torch and of this software."""
    found = {}
    for package in _PACKAGES:
        try:
            found[f"the version of {package}"] = version(package)
        except PackageNotFoundError:
            found[f"the version of {package}"] = "unknown"
    return found


def check_same_start(coordinator: Coordinator, facts: StartFacts) -> None:
    """Compare what all ranks were started with; all of them call this.

    Raises:
        ValueError: on every rank, if something differs; the line names it, the values and the
            ranks.
        PeerLost: a rank has not come, or the store is gone.
    """
    from megatron.core.dist_checkpointing import CheckpointError  # imports torch

    coordinator.begin("start")
    try:
        groups = coordinator.agree("digests", lambda: facts.digest, _alike)
        if len(groups) < 2:
            return
        groups = groups[:_MOST_GROUPS]
        asked = any(ranks[0] == coordinator.rank for ranks in groups)
        text = coordinator.agree(
            "differences",
            lambda: asdict(facts) if asked else None,
            lambda messages: _difference(groups, messages),
        )
    except CheckpointError as error:  # of the agreement itself
        raise PeerLost(f"error: {error}") from None
    raise ValueError(text)


def _alike(digests: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each digest, those of rank 0 first."""
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest, []).append(rank)
    return list(ranks.values())


def _difference(groups: Sequence[Sequence[int]], messages: Sequence[Any]) -> str:
    """Return the line that names what differs between groups of ranks."""
    facts = [messages[ranks[0]] for ranks in groups]
    differing = list(_differing([one["values"] for one in facts]))
    before = [one["before_resolving"] for one in facts]
    explaining = set(_differing(before))
    asked = [name for name in differing if name in explaining or name not in before[0]]
    names = asked or differing
    shown = []
    for name in names[:MOST_NAMED]:
        ranks_of: dict[str, list[int]] = {}
        for ranks, one in zip(groups, facts, strict=True):
            ranks_of.setdefault(one["values"].get(name, "none"), []).extend(ranks)
        values = (f"{value} on {_named(sorted(ranks))}" for value, ranks in ranks_of.items())
        shown.append(f"{name} is {' and '.join(values)}")
    if len(names) > MOST_NAMED:
        shown.append(f"{len(names) - MOST_NAMED} more differences")
    return (
        f"the ranks were not started alike: {'; '.join(shown)}: start all ranks with the same "
        "options, versions and data"
    )


def _differing(values: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the names whose values differ."""
    for name in dict.fromkeys(name for one in values for name in one):
        if len({one.get(name) for one in values}) > 1:
            yield name


def _named(ranks: Sequence[int]) -> str:
    """Return ranks as text, neighbours as a range."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [
        f"{first}" if first == last else f"{first}{'-' if last > first + 1 else ', '}{last}"
        for first, last in ranges
    ]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)
