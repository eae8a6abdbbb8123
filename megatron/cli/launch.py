# SPDX-License-Identifier: Apache-2.0
"""Read torchrun's environment variables and connect to the key-value stores of the run.

The launcher's store outlives every rank, and rank 0's store outlives the launcher. Values that
ranks agree on are written to both.
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

#: Seconds to wait for the launcher's store, which exists before its processes start.
LAUNCHER_SECONDS = 10.0

#: Seconds to wait for an answer of a listening store.
ANSWER_SECONDS = 30.0

#: Seconds to wait for a host name to resolve: a cluster may still be publishing it.
RESOLVE_SECONDS = 30.0


class StoreLink:
    """A connection to the launcher's store that only detects whether the store is lost."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None
        self._lost = False

    def is_lost(self) -> bool:
        """Return whether the store is lost. Sends nothing, so it may be called at any time."""
        if not self._lost and self.connection is not None:
            try:
                self._lost = self.connection.recv(1) == b""
            except BlockingIOError:
                return False
            except OSError:
                self._lost = True
        return self._lost

    def close(self) -> None:
        """Close the connection. `is_lost` keeps its last answer."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Rank, world size and store of this process.

    Args:
        rank, world_size: global rank and number of processes.
        local_rank: rank on this machine.
        address, port: address of the store's server; None for a single process.
        launcher_serves: whether the launcher runs the store's server; otherwise rank 0 does.
        attempt: number of restarts by the launcher, see `agree_on_start`.
        rank0_store: (address, port) of rank 0's store, in addition to the launcher's store; None
            without one.
        link: detects the loss of the launcher's store.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None
    port: int | None = None
    launcher_serves: bool = False
    attempt: int = 0
    rank0_store: tuple[str, int] | None = None
    link: StoreLink = field(default_factory=StoreLink, compare=False)

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Launch:
        """Read torchrun's variables; without them, the run is a single process.

        Raises:
            ValueError: some variables are missing, not numbers or out of range; or none is set and
                another launcher has started several processes.
        """
        # MASTER_ADDR alone does not mean several processes: it is often set for a whole machine.
        launch_variables = [n for n in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if n in environment]
        if not launch_variables:
            if (launcher := other_launcher(environment)) is not None:
                raise ValueError(launcher.refusal)
            return Launch()
        needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in environment]
        if missing:
            raise ValueError(
                f"{launch_variables[0]} is set but {', '.join(missing)} not: "
                "start the run with torchrun, or unset it"
            )
        numbers = {name: _number(environment, name) for name in needed if name != "MASTER_ADDR"}
        _check_ranks(numbers)
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
        self, *, timeout_seconds: float, is_first_client: bool = False, of_job: bool = False
    ) -> dist.Store:
        """Connect a client to the run's store, with keys that only this attempt uses.

        Every thread needs a separate client.

        Args:
            timeout_seconds, is_first_client: see `connect`.
            of_job: share keys with the launcher's other attempts.
        """
        store = self.connect(timeout_seconds=timeout_seconds, is_first_client=is_first_client)
        if of_job:
            return self.job_keys(store)
        if self.rank0_store is None:
            return self.attempt_keys(store)
        import torch.distributed as dist

        address, port = self.rank0_store

        def mirror() -> dist.Store:
            limit = timedelta(seconds=timeout_seconds)
            return self.attempt_keys(
                dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
            )

        from megatron.cli.run_store import RunStore

        return RunStore(self.attempt_keys(store), mirror, lost=self.link.is_lost)

    def connect(self, *, timeout_seconds: float, is_first_client: bool = False) -> dist.Store:
        """Connect a client to the store, without a prefix for its keys.

        Args:
            timeout_seconds: timeout for the server, and the default timeout for a key.
            is_first_client: whether this is the process's first client. Without a launcher's store,
                rank 0's first client starts the server.

        Raises:
            ValueError: the port is in use, or its listener is not a store; see also `reach`.
            RunStopped: see `reach`.
        """
        import torch.distributed as dist

        if self.address is None or self.port is None:
            return dist.HashStore()
        limit = timedelta(seconds=timeout_seconds)
        if is_first_client and self.rank == 0 and not self.launcher_serves:
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

        return self._client_with_timeout(client, min(ANSWER_SECONDS, 5.0 * timeout_seconds))

    def _resolve(self, timeout_seconds: float) -> None:
        """Raise ValueError if the name of rank 0's machine does not resolve."""
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

    def _client_with_timeout(self, make: Callable[[], dist.Store], seconds: float) -> dist.Store:
        """Create a client on a thread, because a client waits forever for a listener that is not a
        store. Raises ValueError."""
        stores: list[dist.Store] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                stores.append(make())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="store-client", daemon=True)
        thread.start()
        thread.join(seconds)
        if stores:
            return stores[0]
        why = _cause(errors[0]) if errors else f"no answer within {seconds:g} seconds"
        raise ValueError(
            f"the listener at MASTER_PORT {self.port} of MASTER_ADDR {self.address} is not the "
            f"store of a run ({why}): give all ranks address and port of rank 0's machine"
        )

    def reach(self, *, timeout_seconds: float) -> socket.socket:
        """Wait until the store's port is open, and return a connection.

        Raises:
            ValueError: the host name does not resolve.
            RunStopped: the port is closed.
        """
        begun = time.monotonic()
        seconds = (
            min(LAUNCHER_SECONDS, timeout_seconds) if self.launcher_serves else timeout_seconds
        )
        while True:
            elapsed = time.monotonic() - begun
            try:
                return socket.create_connection(
                    (self.address, self.port), timeout=max(1.0, seconds - elapsed)
                )
            except socket.gaierror as error:
                if elapsed > min(RESOLVE_SECONDS, timeout_seconds):
                    raise self._no_address(error) from None
            except OSError as error:
                if elapsed > seconds:
                    raise self._no_listener(seconds, error) from None
            time.sleep(0.1)

    def _no_listener(self, seconds: float, error: OSError) -> RunStopped:
        endpoint = f"MASTER_PORT {self.port} of MASTER_ADDR {self.address}"
        why = f"nothing listens at {endpoint} after {seconds:g} seconds ({error.strerror or error})"
        if self.launcher_serves:
            return RunStopped(ExitCode.LAUNCHER_LOST, f"{why}: the launcher is gone")
        return RunStopped(
            ExitCode.PEER_LOST, f"{why}: rank 0 has not started, or runs elsewhere; see its log"
        )

    def serve_store(self, *, timeout_seconds: float) -> tuple[tuple[str, int], dist.TCPStore]:
        """Start rank 0's store, which outlives the launcher's store.

        Returns:
            The address and port for the other ranks, and the store.
        """
        import torch.distributed as dist

        assert self.address is not None
        with contextlib.closing(self.reach(timeout_seconds=timeout_seconds)) as connection:
            local_address, launcher_address = (
                connection.getsockname()[0],
                connection.getpeername()[0],
            )
        store = dist.TCPStore(
            "localhost",
            0,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
        # On the launcher's machine, all ranks are known to resolve its name.
        return (
            self.address if local_address == launcher_address else local_address,
            store.port,
        ), store

    def attempt_keys(self, store: dist.Store) -> dist.Store:
        """Return a view of a client with keys that only this attempt uses."""
        import torch.distributed as dist

        return dist.PrefixStore(f"megatron/attempt_{self.attempt}", store)

    def job_keys(self, store: dist.Store) -> dist.Store:
        """Return a view of a client with keys that all attempts of the launcher share."""
        import torch.distributed as dist

        return dist.PrefixStore("megatron/job", store)


def _cause(error: Exception) -> str:
    """Return the message of a torch error without its C++ frames."""
    return one_line(error).partition(" Exception raised from")[0][:200]


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(
            f"{name} is {environment[name]!r}, which is not a number: start the run with torchrun, "
            "or correct it"
        ) from None


def _check_ranks(numbers: Mapping[str, int]) -> None:
    """Check world size, ranks and port. Raises ValueError."""
    world = numbers["WORLD_SIZE"]
    if world < 1:
        raise ValueError(f"WORLD_SIZE is {world}: it must be at least 1")
    for name in ("RANK", "LOCAL_RANK"):
        if not 0 <= numbers[name] < world:
            raise ValueError(
                f"{name} is {numbers[name]}, but WORLD_SIZE is {world}: ranks go from 0 to "
                f"{world - 1}"
            )
    if not 0 < numbers["MASTER_PORT"] < 1 << 16:
        raise ValueError(f"MASTER_PORT is {numbers['MASTER_PORT']}: ports go from 1 to 65535")
