# SPDX-License-Identifier: Apache-2.0
"""Machines that a run must keep off, as they have computed a step wrongly: SAVE/faulty_hosts.json.

    {"hosts": [{"host": "a", "rank": 1, "iteration": 3, "kind": "nan",
                "values": ["nan", "nan"], "sound": "0x1.8p+2", "sound_on": ["b"]}]}

`values` came out there, `sound` elsewhere, as Python's float.hex. Remove an entry to use its
machine again.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import Coordinator
from megatron.core.untrusted_files import read_json, replace_file
from megatron.training.errors import RunStopped
from megatron.training.exit_codes import ExitCode

#: In the save folder.
FILE = "faulty_hosts.json"


def read_faulty(save: str) -> list[dict[str, Any]]:
    """Return the entries of a save folder; none if there is no file.

    Raises:
        ValueError: it cannot be read.
    """
    path = Path(save, FILE)
    try:
        found = read_json(path)["hosts"]
        return [{**entry, "host": str(entry["host"])} for entry in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): mend or remove it") from error


def add_faulty(save: str, entries: Collection[dict[str, Any]]) -> None:
    """Note machines, all or none of them."""
    path = Path(save, FILE)
    both = {"hosts": [*read_faulty(save), *entries]}
    replace_file(path, json.dumps(both, indent=1))


def refuse_faulty_hosts(save: str | None, coordinator: Coordinator) -> None:
    """See that no rank runs on a machine that is noted; every rank calls this.

    Raises:
        RunStopped: one does: restart elsewhere.
        ValueError: the file cannot be read.
    """
    if save is None:
        return

    def decide(hosts: list[Any]) -> dict[str, str]:
        try:
            noted = {entry["host"]: entry for entry in read_faulty(save)}
        except ValueError as error:
            return {"damaged": str(error)}
        for rank, host in enumerate(hosts):
            if host in noted:
                entry = noted[host]
                return {
                    "refused": f"rank {rank} is on {host}, which gave a wrong iteration "
                    f"{entry.get('iteration')} ({entry.get('kind')}): start on other machines, or "
                    f"remove its entry from {Path(save, FILE)}"
                }
        return {}

    coordinator.begin("looking for faulty machines")
    found = coordinator.agree("machines", socket.gethostname, decide)
    if "damaged" in found:
        raise ValueError(found["damaged"])
    if "refused" in found:
        raise RunStopped(ExitCode.RESTART_ELSEWHERE, found["refused"])
