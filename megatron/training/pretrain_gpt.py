# SPDX-License-Identifier: Apache-2.0
"""Entry script: pretrain a GPT.

    torchrun --nproc-per-node 2 -m megatron.training.pretrain_gpt --config run.yaml

Options, files and layout are checked before any process group exists; torch is imported after that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.training.config import Config
from megatron.training.errors import run_entry_point
from megatron.training.flags import CommandLine, parse_command_line, show_config
from megatron.training.launch import Launch
from megatron.training.resolve import Run, resolve
from megatron.training.termination import block_sigterm, exit_on_sigterm

if TYPE_CHECKING:
    from megatron.training.peers import PeerWatch

PROG = "pretrain_gpt"


def read_run(argv: Sequence[str], launch: Launch) -> Run:
    """Turn arguments into a run.

    Raises:
        HelpRequested: `--help`, `--print-config` and the like.
        ValueError: everything that is wrong with the options, in one line.
    """
    line = parse_command_line(
        Config,
        argv,
        prog=f"python -m megatron.training.{PROG}",
        description="Pretrain a GPT; start several processes with torchrun.",
        print_now=False,
    )
    from megatron.training.check import check

    problems = check(line.config, launch.world_size)
    if problems:
        raise ValueError("; ".join(problems))
    run = resolve(line.config, launch.world_size)
    notes = {
        "processes": f"{run.world_size}, data parallel size {run.data_parallel_size}",
        "microbatches per step": str(run.num_microbatches),
        "iterations": str(run.train_iters),
    }
    show_config(CommandLine(run.config, line.invocation), notes=notes)
    return run


def start_watch(launch: Launch, timeout_seconds: float) -> PeerWatch | None:
    """Make this process known to the others and end it when the launcher says so."""
    if launch.world_size == 1:
        return None
    from megatron.training.peers import PeerWatch

    watches: list[PeerWatch] = []

    def explain() -> str | None:
        # The launcher ends the survivors at once, when they may know of the death no more than it.
        found = watches[0].diagnose(1.0) if watches else None
        text = f"{PROG}: {found.text if found else 'ended by SIGTERM'}"
        told = found is not None and found.told
        return text if watches and not told and watches[0].claim(text) else None

    exit_on_sigterm(explain)
    # The server, where the launcher has none, lives as long as the watch.
    first = launch.open_store(timeout_seconds=timeout_seconds, first=True)
    clients = iter([first])
    watches.append(
        PeerWatch(
            lambda: next(clients, None) or launch.open_store(timeout_seconds=timeout_seconds),
            rank=launch.rank,
            world_size=launch.world_size,
        )
    )
    return watches[0]


def train(run: Run, launch: Launch, watch: PeerWatch | None) -> None:
    """Join the other processes and carry out the run."""
    if run.config.training.deterministic_mode:
        # Read by the GPU's matrix library when it starts; without it torch refuses to go on.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from megatron.training.pretraining import pretrain
    from megatron.training.run_groups import blaming_peers, join_run

    torch.use_deterministic_algorithms(run.config.training.deterministic_mode)
    with blaming_peers(watch), join_run(run, launch, watch) as place:
        pretrain(run, place)


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return this process's exit code.

    Args:
        argv: arguments without the program's name.
        environment: of this process, where torchrun says which rank it is.
    """
    watches: list[PeerWatch] = []
    launches: list[Launch] = []

    def work() -> None:
        launch = Launch.from_environment(environment)
        launches.append(launch)
        if launch.world_size > 1:
            block_sigterm()
        run = read_run(argv, launch)
        watch = start_watch(launch, run.config.parallel.distributed_timeout_minutes * 60.0)
        if watch is not None:
            watches.append(watch)
        train(run, launch, watch)

    def claim(text: str) -> bool:
        # Before the watch every rank finds the same faults in the same options.
        return watches[0].claim(text) if watches else not launches or launches[0].rank == 0

    return run_entry_point(work, prog=PROG, claim=claim)


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of a process group whose peer is dead would hold the interpreter's end.
    os._exit(code)
