# SPDX-License-Identifier: Apache-2.0
"""What torchrun tells a process through its environment, and the key-value store all ranks
share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among those of the run.

    Args:
        rank, world_size: over all machines.
        local_rank: position on this machine.
        address, port: of the store's server; None for a single process.
        launcher_serves: whether the launcher runs that server, else rank 0 does.
        attempt: how often the launcher has restarted the processes; see `agree_on_start`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None
    port: int | None = None
    launcher_serves: bool = False
    attempt: int = 0

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Launch:
        """Read torchrun's variables; without them this is a single process.

        Raises:
            ValueError: some of them are set and others are missing or no numbers.
        """
        # An address alone does not make several processes: it is often set for a whole machine.
        telling = [n for n in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if n in environment]
        if not telling:
            return Launch()
        needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in environment]
        if missing:
            raise ValueError(
                f"{telling[0]} is set but {', '.join(missing)} not: start the run with torchrun, "
                "or unset what is"
            )
        try:
            numbers = {name: int(environment[name]) for name in needed if name != "MASTER_ADDR"}
            attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        except ValueError as error:
            raise ValueError(f"the launcher's environment is broken: {error}") from None
        return Launch(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            address=environment["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
            launcher_serves=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=attempt,
        )

    def open_store(
        self, *, timeout_seconds: float, first: bool = False, of_job: bool = False
    ) -> dist.Store:
        """Connect a client to the run's store; its keys are this attempt's own.

        Every thread needs a client of its own.

        Args:
            timeout_seconds, first: see `connect`.
            of_job: share keys with the launcher's other attempts.
        """
        store = self.connect(timeout_seconds=timeout_seconds, first=first)
        return self.job_keys(store) if of_job else self.own_keys(store)

    def connect(self, *, timeout_seconds: float, first: bool = False) -> dist.Store:
        """Connect a client to the store, whose keys are everybody's.

        Args:
            timeout_seconds: how long to wait for the server, and for a key by default.
            first: whether this is the process's first client; it starts the server where the
                launcher does not serve.
        """
        import torch.distributed as dist

        if self.address is None or self.port is None:
            return dist.HashStore()
        return dist.TCPStore(
            self.address,
            self.port,
            is_master=first and self.rank == 0 and not self.launcher_serves,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )

    def own_keys(self, store: dist.Store) -> dist.Store:
        """Return a client's view of this attempt's own keys."""
        import torch.distributed as dist

        return dist.PrefixStore(f"megatron/attempt_{self.attempt}", store)

    def job_keys(self, store: dist.Store) -> dist.Store:
        """Return a client's view of the keys that all attempts of the launcher share."""
        import torch.distributed as dist

        return dist.PrefixStore("megatron/job", store)
