# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks were started with the same options, versions and data.

Ranks may be started with different options, installations or copies of the data. A difference in
shapes or in the number of steps crashes a collective. A difference in a learning rate or a seed
goes unnoticed and trains the wrong model. Before any process group exists, ranks therefore compare
digests over the store. If the digests differ, one line names each difference with its values and
ranks.
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

#: Differences named in the error; further ones are counted.
MAX_NAMED_DIFFERENCES = 6

#: Groups of ranks with equal digests whose values are compared.
_MAX_GROUPS = 8

_PACKAGES = ("torch", "megatron-core", "megatron-lm")


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """Options, versions and data of a rank. All ranks of a run must have the same `values`.

    Args:
        values: values by name, as shown to the user.
        before_resolving: options before derived values are filled in, by their names in `values`.
            A derived option that differs is not reported if another option explains it.
    """

    values: Mapping[str, str]
    before_resolving: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of `values`."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()


def option_values(config: object, *, leave_out: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a schema's object by flag, as text.

    Args:
        leave_out: options that may differ between ranks, without leading dashes.
    """
    return {
        f"--{name}": _text(value)
        for name, value in flatten(config).items()
        if name not in leave_out
    }


def versions() -> dict[str, str]:
    """Return the versions of torch and of this project's packages."""
    package_versions = {}
    for package in _PACKAGES:
        try:
            package_versions[f"the version of {package}"] = version(package)
        except PackageNotFoundError:
            package_versions[f"the version of {package}"] = "unknown"
    return package_versions


def check_same_start(coordinator: Coordinator, facts: StartFacts) -> None:
    """Compare the `StartFacts` of all ranks. Collective.

    Raises:
        ValueError: on every rank, if values differ; the message names values and ranks.
        PeerLost: a rank does not answer, or the store is lost.
    """
    from megatron.core.dist_checkpointing import CheckpointError  # imports torch

    coordinator.begin("start")
    try:
        groups = coordinator.agree("digests", lambda: facts.digest, _alike)
        if len(groups) < 2:
            return
        groups = groups[:_MAX_GROUPS]
        sends_facts = any(ranks[0] == coordinator.rank for ranks in groups)
        text = coordinator.agree(
            "differences",
            lambda: asdict(facts) if sends_facts else None,
            lambda messages: _difference(groups, messages),
        )
    except CheckpointError as error:  # the exchange itself failed
        raise PeerLost(f"error: {error}") from None
    raise ValueError(text)


def _alike(digests: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks with equal digests, rank 0's group first."""
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest, []).append(rank)
    return list(ranks.values())


def _difference(groups: Sequence[Sequence[int]], messages: Sequence[Any]) -> str:
    """Return the error that names the differences between groups of ranks."""
    facts = [messages[ranks[0]] for ranks in groups]
    differing = list(_differing([group_facts["values"] for group_facts in facts]))
    before = [group_facts["before_resolving"] for group_facts in facts]
    explaining = set(_differing(before))
    underived = [name for name in differing if name in explaining or name not in before[0]]
    names = underived or differing
    lines = []
    for name in names[:MAX_NAMED_DIFFERENCES]:
        ranks_of: dict[str, list[int]] = {}
        for ranks, group_facts in zip(groups, facts, strict=True):
            ranks_of.setdefault(group_facts["values"].get(name, "none"), []).extend(ranks)
        values = (f"{value} on {_named(sorted(ranks))}" for value, ranks in ranks_of.items())
        lines.append(f"{name} is {' and '.join(values)}")
    if len(names) > MAX_NAMED_DIFFERENCES:
        lines.append(f"{len(names) - MAX_NAMED_DIFFERENCES} more differences")
    return (
        f"the ranks were not started alike: {'; '.join(lines)}: start all ranks with the same "
        "options, versions and data"
    )


def _differing(values: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the names whose values differ."""
    for name in dict.fromkeys(name for group_values in values for name in group_values):
        if len({group_values.get(name) for group_values in values}) > 1:
            yield name


def _named(ranks: Sequence[int]) -> str:
    """Return ranks as text, consecutive ranks as a range."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [
        f"{start}" if start == end else f"{start}{'-' if end > start + 1 else ', '}{end}"
        for start, end in ranges
    ]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)
