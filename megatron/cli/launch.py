# SPDX-License-Identifier: Apache-2.0
"""What torchrun tells a process through its environment, and the key-value stores all ranks
share.

The launcher's store outlives every rank, and rank 0's store outlives the launcher: what all ranks
agree on is written to both.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron.cli.errors import ExitCode, RunStopped, one_line
from megatron.cli.other_launchers import other_launcher

if TYPE_CHECKING:
    import torch.distributed as dist

#: How long a launcher's store may be out of reach, in seconds: it is there before its processes.
LAUNCHER_SECONDS = 10.0

#: How long a store that listens may take to answer, in seconds.
ANSWER_SECONDS = 30.0

#: How long a name may take until it has an address, in seconds: a cluster may be about to give it.
RESOLVE_SECONDS = 30.0


class StoreLink:
    """A connection to the launcher's store that only tells whether that is still there."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None
        self._lost = False

    def is_lost(self) -> bool:
        """Return whether the store is gone; asks nobody, so that it may be called at any time."""
        if not self._lost and self.connection is not None:
            try:
                self._lost = self.connection.recv(1) == b""
            except BlockingIOError:
                return False
            except OSError:
                self._lost = True
        return self._lost

    def close(self) -> None:
        """Close the connection; what was known stays known."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among those of the run.

    Args:
        rank, world_size: over all machines.
        local_rank: position on this machine.
        address, port: of the store's server; None for a single process.
        launcher_serves: whether the launcher runs that server, else rank 0 does.
        attempt: how often the launcher has restarted the processes; see `agree_on_start`.
        own: (address, port) of the store that rank 0 serves beside that of the launcher, if it
            does.
        link: tells whether the launcher's store is gone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None
    port: int | None = None
    launcher_serves: bool = False
    attempt: int = 0
    own: tuple[str, int] | None = None
    link: StoreLink = field(default_factory=StoreLink, compare=False)

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Launch:
        """Read torchrun's variables; without them this is a single process.

        Raises:
            ValueError: some of them are set and others are missing, no numbers, or out of range;
                or there are none, and another launcher has started several processes.
        """
        # An address alone does not make several processes: it is often set for a whole machine.
        telling = [n for n in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if n in environment]
        if not telling:
            if (other := other_launcher(environment)) is not None:
                raise ValueError(other.refusal)
            return Launch()
        needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in environment]
        if missing:
            raise ValueError(
                f"{telling[0]} is set but {', '.join(missing)} not: start the run with torchrun, "
                "or unset what is"
            )
        numbers = {name: _number(environment, name) for name in needed if name != "MASTER_ADDR"}
        _see_places(numbers)
        attempt = 0
        if "TORCHELASTIC_RESTART_COUNT" in environment:
            attempt = _number(environment, "TORCHELASTIC_RESTART_COUNT")
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
        if of_job:
            return self.job_keys(store)
        if self.own is None:
            return self.own_keys(store)
        import torch.distributed as dist

        address, port = self.own

        def mirror() -> dist.Store:
            limit = timedelta(seconds=timeout_seconds)
            return self.own_keys(
                dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
            )

        from megatron.cli.run_store import RunStore

        return RunStore(self.own_keys(store), mirror, lost=self.link.is_lost)

    def connect(self, *, timeout_seconds: float, first: bool = False) -> dist.Store:
        """Connect a client to the store, whose keys are everybody's.

        Args:
            timeout_seconds: how long to wait for the server, and for a key by default.
            first: whether this is the process's first client; it starts the server where the
                launcher does not serve.

        Raises:
            ValueError, RunStopped: see `reach`; the port is taken, or by no store.
        """
        import torch.distributed as dist

        if self.address is None or self.port is None:
            return dist.HashStore()
        limit = timedelta(seconds=timeout_seconds)
        if first and self.rank == 0 and not self.launcher_serves:
            self._resolve(timeout_seconds)
            try:
                return dist.TCPStore(
                    self.address, self.port, is_master=True, timeout=limit, wait_for_workers=False
                )
            except dist.DistError as error:
                raise ValueError(
                    f"rank 0 cannot listen at MASTER_PORT {self.port} of {self.address} "
                    f"({_cause(error)}): set a port that is free and an address of this machine"
                ) from None
        self.reach(timeout_seconds=timeout_seconds).close()
        address, port = self.address, self.port

        def client() -> dist.Store:
            return dist.TCPStore(
                address, port, is_master=False, timeout=limit, wait_for_workers=False
            )

        return self._answered(client, min(ANSWER_SECONDS, 5.0 * timeout_seconds))

    def _resolve(self, timeout_seconds: float) -> None:
        """Raise ValueError if the name of rank 0's machine has no address."""
        begun = time.monotonic()
        while True:
            try:
                socket.getaddrinfo(self.address, self.port, proto=socket.IPPROTO_TCP)
                return
            except socket.gaierror as error:
                if time.monotonic() - begun > min(RESOLVE_SECONDS, timeout_seconds):
                    raise self._no_address(error) from None
            time.sleep(0.1)

    def _no_address(self, error: socket.gaierror) -> ValueError:
        return ValueError(
            f"MASTER_ADDR {self.address} has no address ({error.strerror}): set the name or "
            "address of rank 0's machine"
        )

    def _answered(self, make: Callable[[], dist.Store], seconds: float) -> dist.Store:
        """Make a client of what listens. A client waits for ever for the answer of a program that
        is no store. Raises ValueError."""
        made: list[dist.Store] = []
        failed: list[Exception] = []

        def work() -> None:
            try:
                made.append(make())
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="store-client", daemon=True)
        thread.start()
        thread.join(seconds)
        if made:
            return made[0]
        why = _cause(failed[0]) if failed else f"no answer within {seconds:g} seconds"
        raise ValueError(
            f"what listens at MASTER_PORT {self.port} of MASTER_ADDR {self.address} is no store of "
            f"a run ({why}): give all ranks address and port of rank 0's machine"
        )

    def reach(self, *, timeout_seconds: float) -> socket.socket:
        """Wait until somebody listens where the store is, and return a connection.

        Raises:
            ValueError: the address has no such name.
            RunStopped: nobody listens.
        """
        begun = time.monotonic()
        seconds = (
            min(LAUNCHER_SECONDS, timeout_seconds) if self.launcher_serves else timeout_seconds
        )
        while True:
            late = time.monotonic() - begun
            try:
                return socket.create_connection(
                    (self.address, self.port), timeout=max(1.0, seconds - late)
                )
            except socket.gaierror as error:
                if late > min(RESOLVE_SECONDS, timeout_seconds):
                    raise self._no_address(error) from None
            except OSError as error:
                if late > seconds:
                    raise self._nobody(seconds, error) from None
            time.sleep(0.1)

    def _nobody(self, seconds: float, error: OSError) -> RunStopped:
        place = f"MASTER_PORT {self.port} of MASTER_ADDR {self.address}"
        why = f"nobody listens at {place} after {seconds:g} seconds ({error.strerror or error})"
        if self.launcher_serves:
            return RunStopped(ExitCode.LAUNCHER_LOST, f"{why}: the launcher is gone")
        return RunStopped(
            ExitCode.PEER_LOST, f"{why}: rank 0 has not started, or elsewhere; see its log"
        )

    def serve_store(self, *, timeout_seconds: float) -> tuple[tuple[str, int], dist.TCPStore]:
        """Serve a store beside the launcher's, which outlives it: rank 0 does.

        Returns address and port by which the other ranks reach it, and the store.
        """
        import torch.distributed as dist

        assert self.address is not None
        with contextlib.closing(self.reach(timeout_seconds=timeout_seconds)) as connection:
            here, there = connection.getsockname()[0], connection.getpeername()[0]
        store = dist.TCPStore(
            "localhost",
            0,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
        # On the launcher's machine the name by which all have found that serves best.
        return (self.address if here == there else here, store.port), store

    def own_keys(self, store: dist.Store) -> dist.Store:
        """Return a client's view of this attempt's own keys."""
        import torch.distributed as dist

        return dist.PrefixStore(f"megatron/attempt_{self.attempt}", store)

    def job_keys(self, store: dist.Store) -> dist.Store:
        """Return a client's view of the keys that all attempts of the launcher share."""
        import torch.distributed as dist

        return dist.PrefixStore("megatron/job", store)


def _cause(error: Exception) -> str:
    """Return what torch says of an error, without its frames."""
    return one_line(error).partition(" Exception raised from")[0][:200]


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(
            f"{name} is {environment[name]!r}, which is no number: start the run with torchrun, or "
            "set it right"
        ) from None


def _see_places(numbers: Mapping[str, int]) -> None:
    """See that a process can be where its variables say. Raises ValueError."""
    world = numbers["WORLD_SIZE"]
    if world < 1:
        raise ValueError(f"WORLD_SIZE is {world}: it counts the processes, at least 1")
    for name in ("RANK", "LOCAL_RANK"):
        if not 0 <= numbers[name] < world:
            raise ValueError(
                f"{name} is {numbers[name]}, but WORLD_SIZE is {world}: ranks go from 0 to "
                f"{world - 1}"
            )
    if not 0 < numbers["MASTER_PORT"] < 1 << 16:
        raise ValueError(f"MASTER_PORT is {numbers['MASTER_PORT']}: ports go from 1 to 65535")
