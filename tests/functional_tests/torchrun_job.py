# SPDX-License-Identifier: Apache-2.0
"""Jobs started by torchrun, for tests of the launcher."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from megatron.training.monitoring.metrics import read_metrics
from tests.support import status_record


def torchrun(
    argv: list[str],
    *launcher: str,
    processes: int,
    module: str = "megatron.training.pretrain_gpt",
) -> subprocess.Popen:
    """Start torchrun in a new session, like a terminal.

    Args:
        argv: arguments of the module.
        launcher: arguments of torchrun.
        processes: number of ranks.
        module: module that each rank runs.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    recorder = ["tests.support.status_record"] if status_record.VARIABLE in os.environ else []
    command += [*launcher, "-m", *recorder, module, *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_iteration(metrics: Path, iteration: int, job: subprocess.Popen) -> None:
    """Wait until a job has logged an iteration; fail if it ends before."""
    while not metrics.exists() or iteration not in [e["iteration"] for e in read_metrics(metrics)]:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.01)


class RanksOf:
    """The processes that a launcher has started, accessible after the launcher's end.

    Args:
        job: the launcher, all of whose ranks have started.
    """

    def __init__(self, job: subprocess.Popen) -> None:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
        self._processes = [os.pidfd_open(int(pid)) for pid in children.split()]

    def __len__(self) -> int:
        return len(self._processes)

    def wait(self) -> None:
        """Wait for all processes to end; their pipes close slightly earlier."""
        for process in self._processes:
            select.select([process], [], [])
            os.close(process)
        self._processes.clear()
