# SPDX-License-Identifier: Apache-2.0
"""Launchers other than torchrun: rank and world size from the variables of srun and mpirun.

They do not set torchrun's variables, so each of their processes would otherwise start a run of a
single process: N runs that write the same files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OtherLauncher:
    """A launcher that started this process as one of several.

    Args:
        command: the launcher's command.
        rank, world_size: rank and number of processes, from the launcher's variables.
        nodes: number of machines.
        rank_variable, size_variable: names of the variables of rank and world size.
    """

    command: str
    rank: int
    world_size: int
    nodes: int
    rank_variable: str
    size_variable: str

    @property
    def refusal(self) -> str:
        """The error message: why the processes cannot continue, and the command to start
        instead."""
        torchrun = f"torchrun --standalone --nproc-per-node {self.world_size} -m"
        where = ""
        if self.nodes > 1:
            torchrun = (
                f"torchrun --nnodes {self.nodes} --nproc-per-node "
                f"{-(-self.world_size // self.nodes)} --rdzv-backend c10d --rdzv-endpoint "
                "FIRST_NODE:29500 -m"
            )
            where = " once on each node"
            if self.command == "srun":
                torchrun = f"srun --ntasks-per-node 1 {torchrun}"
        return (
            f"{self.size_variable} is {self.world_size}, so {self.command} started "
            f"{self.world_size} processes, each of which would be a separate run that writes the "
            f"same files: start `{torchrun}`{where} instead of `{self.command} python -m`; "
            f"for independent runs of one process each unset {self.rank_variable}"
        )


@dataclass(frozen=True, kw_only=True)
class _Variables:
    """The variables of one launcher. If a field has several names, the first variable that is set
    counts.

    Args:
        command: the launcher's command.
        rank, size: names of the variables of rank and world size.
        nodes: names of the variable with the number of machines.
        local_size: names of the variable with the number of processes on this machine.
    """

    command: str
    rank: str
    size: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()


# mpirun before srun: under Slurm, mpirun starts one daemon per machine by srun. A Slurm step may
# have fewer tasks than its job.
_LAUNCHERS = (
    _Variables(
        command="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables(
        command="mpirun",
        rank="MV2_COMM_WORLD_RANK",
        size=("MV2_COMM_WORLD_SIZE",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables(
        command="srun",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    ),
    _Variables(
        command="mpirun", rank="PMI_RANK", size=("PMI_SIZE",), local_size=("MPI_LOCALNRANKS",)
    ),
)


def other_launcher(environment: Mapping[str, str]) -> OtherLauncher | None:
    """Return the launcher other than torchrun that started this process as one of several.

    Args:
        environment: environment variables, without torchrun's.

    Returns None if there is no such launcher, or it started a single process.
    """
    for names in _LAUNCHERS:
        rank, size = _number(environment, (names.rank,)), _number(environment, names.size)
        if rank is None or size is None or size[1] < 2:
            continue
        nodes, local = _number(environment, names.nodes), _number(environment, names.local_size)
        count = nodes[1] if nodes is not None else 1
        if local is not None:
            count = -(-size[1] // max(local[1], 1))
        return OtherLauncher(
            command=names.command,
            rank=rank[1],
            world_size=size[1],
            nodes=count,
            rank_variable=names.rank,
            size_variable=size[0],
        )
    return None


def _number(environment: Mapping[str, str], names: Sequence[str]) -> tuple[str, int] | None:
    """Return the first variable that contains a number, and the number."""
    for name in names:
        if environment.get(name, "").isdecimal():
            return name, int(environment[name])
    return None
