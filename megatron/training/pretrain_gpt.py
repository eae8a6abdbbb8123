# SPDX-License-Identifier: Apache-2.0
"""Entry script: pretrain a GPT.

    torchrun --nproc-per-node 2 -m megatron.training.pretrain_gpt --config run.yaml

Options, files and the parallel layout are checked before any process group exists; torch is
imported after that.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.cli.error_reports import ErrorReports
from megatron.cli.errors import run_entry_point
from megatron.cli.flags import CommandLine, parse_command_line, show_config
from megatron.cli.launch import Launch
from megatron.cli.standard_streams import go_on_without_streams
from megatron.training.checkpointing.stored_model import (
    checkpoint_defaults,
    stored_options,
    with_checkpoint_matrices,
    with_checkpoint_schedule,
)
from megatron.training.config import Config
from megatron.training.config.layer_pattern_options import FLAG, is_hybrid, pattern_defaults
from megatron.training.config.megatron_flags import accepted_flags
from megatron.training.config.resolve import ResolvedRun, resolve
from megatron.training.experiments import check_experiments
from megatron.training.fault_tolerance.launcher import LauncherWatch, launcher_of
from megatron.training.fault_tolerance.stopping import Listener, StopRequests, signals_to_thread

if TYPE_CHECKING:
    from megatron.training.fault_tolerance.peers import PeerWatch


@dataclass(frozen=True, kw_only=True)
class Program:
    """The differences between the pretraining entry scripts.

    Args:
        name: name of the module in megatron.training, and prefix of its messages.
        description: one line for `--help`.
        problems: lists problems of a config for this program alone, each with its fix; if there are
            any, no other problem is listed.
        replaced: options that this program requires instead of options without a default.
    """

    name: str
    description: str
    problems: Callable[[Config], Iterator[str]]
    replaced: Mapping[str, str] = field(default_factory=dict)


def _gpt_problems(config: Config) -> Iterator[str]:
    if is_hybrid(config):
        yield (
            f"{FLAG} {config.hybrid.hybrid_layer_pattern} is not a GPT, which has *- or *E "
            "(+- or +E) for each layer: start python -m megatron.training.pretrain_hybrid"
        )


PRETRAIN_GPT = Program(
    name="pretrain_gpt",
    description="Pretrain a GPT; start several processes with torchrun.",
    problems=_gpt_problems,
)


def read_run(
    argv: Sequence[str], launch: Launch, *, program: Program = PRETRAIN_GPT
) -> ResolvedRun:
    """Parse arguments into a run.

    Raises:
        HelpRequested: `--help`, `--print-config` and similar flags.
        ValueError: all problems of the options, in one line.
    """
    line = parse_command_line(
        Config,
        argv,
        prog=f"python -m megatron.training.{program.name}",
        description=program.description,
        print_now=False,
        defaults=_defaults,
        replaced=program.replaced,
        accepted=accepted_flags(stored_options),
    )
    from megatron.training.config.check import check
    from megatron.training.config.implementation_checks import machine_problems
    from megatron.training.config.unused_options import without_effect
    from megatron.training.data import data_paths

    config, overridden = with_checkpoint_schedule(line.config, launch.world_size)
    config, matrices = with_checkpoint_matrices(config)
    problems = list(program.problems(config))
    if not problems:
        problems = [*check(config, launch.world_size), *data_paths.problems(config.data)]
    problems = problems or check_experiments(config.experiments)
    unmet_requirements = list(machine_problems(config))
    if not line.invocation.print_config:
        problems += unmet_requirements
    if problems:
        raise ValueError("; ".join(problems))
    run = resolve(config, launch.world_size)
    unused = without_effect(config, run.config)
    if unused and line.invocation.strict_flags:
        raise ValueError(f"--strict-flags: {'; '.join(unused)}")
    start_lines = (*line.notes, *unused, *overridden, *matrices, *unmet_requirements)
    for note in start_lines if launch.rank == 0 else ():
        print(f"{program.name}: {note}", file=sys.stderr, flush=True)
    notes = {
        "processes": f"{run.world_size}, data parallel size {run.data_parallel_size}",
        "microbatches per step": str(run.num_microbatches),
        "iterations": str(run.train_iters),
    }
    show_config(CommandLine(run.config, line.invocation), notes=notes)
    return run


def _defaults(user_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option values that a Hugging Face folder, a checkpoint or a layer pattern
    implies."""
    defaults: dict[str, Any] = {}
    if user_values.get("load-hf") is not None:
        from megatron.training.checkpointing.hf_import import folder_defaults

        defaults = folder_defaults(user_values)
    defaults = {**checkpoint_defaults({**user_values, **defaults}), **defaults}
    # An explicit pattern determines the number of layers, whatever other options specify.
    return {**defaults, **pattern_defaults(user_values)}


def start_watch(
    run: ResolvedRun, launch: Launch, launcher: LauncherWatch
) -> tuple[Launch, PeerWatch | None]:
    """Announce this process to the other ranks; a single process needs no watch.

    Args:
        launcher: watches the launcher's store.

    Returns the launch with the attempt number agreed by all ranks, and the watch.
    """
    if launch.world_size == 1:
        return launch, None
    from megatron.training.fault_tolerance.hang_files import HangFiles
    from megatron.training.fault_tolerance.peers import PeerWatch
    from megatron.training.fault_tolerance.restart import agree_on_start

    seconds = run.config.parallel.distributed_timeout_minutes * 60.0
    save, files = run.config.checkpoint.save, None
    store = launch.connect(timeout_seconds=seconds, is_first_client=True)
    address, second_server = None, None
    if launch.launcher_serves:
        launcher.watch_store(launch.reach(timeout_seconds=seconds))
        if launch.rank == 0:
            address, second_server = launch.serve_store(timeout_seconds=seconds)
    launch = agree_on_start(launch, store, timeout_seconds=seconds, rank0_store=address)
    if save is not None:
        files = HangFiles(
            save,
            attempt=launch.attempt,
            rank=launch.rank,
            # Before other ranks time out and the launcher kills this process with theirs.
            frozen_seconds=max(0.5 * seconds, 2.5),
        )
    return launch, PeerWatch(
        lambda: launch.open_store(timeout_seconds=seconds),
        rank=launch.rank,
        world_size=launch.world_size,
        files=files,
        servers=(store, second_server),
        serves=lambda: not launch.rank and (second_server is None or launch.link.is_lost()),
    )


def train(run: ResolvedRun, launch: Launch, stop: StopRequests) -> None:
    """Join the process groups and execute the run."""
    if run.config.training.deterministic_mode:
        # cuBLAS reads it on initialisation; without it, torch rejects deterministic algorithms.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from megatron.training.data.data_sets import read_inputs
    from megatron.training.distributed_context import blaming_peers, join_run
    from megatron.training.fault_tolerance.restart import resume_own_checkpoint
    from megatron.training.pretraining import pretrain

    torch.use_deterministic_algorithms(run.config.training.deterministic_mode)
    with blaming_peers(stop.watch):
        inputs = read_inputs(run)
        with join_run(run, launch, inputs.start_facts(run), stop=stop) as context:
            resumed = resume_own_checkpoint(run) if context.restarts.resumes else run
            pretrain(resumed, context, inputs)


class RunProcess:
    """A process of a run: it reads the options, joins the other ranks and trains.

    Args:
        argv: arguments without the program's name.
        environment: environment variables, in which torchrun passes the rank.
        program: the entry script.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], program: Program
    ) -> None:
        self._argv, self._environment, self._program = argv, environment, program
        self._reports = ErrorReports(environment)
        self._stop = StopRequests(self._say, end=self._end)
        self._listener: Listener | None = None
        self._launcher: LauncherWatch | None = None

    def run(self) -> int:
        """Run the command and return this process's exit code."""
        stop, report = self._stop, self._reports.report
        with signals_to_thread(stop.react, stop.on_main) as self._listener:
            if self._listener is not None:
                stop.wake = self._listener.notify
            code = run_entry_point(self._train, prog=self._program.name, report=report)
        if self._launcher is not None:
            self._launcher.close()
        if stop.watch is not None:
            stop.watch.cleanup()
        return code or stop.code

    def _train(self) -> None:
        """Read the options, join the other ranks, and execute the run."""
        launch = Launch.from_environment(self._environment)
        pid = launcher_of(self._environment, os.getppid())
        self._launcher = LauncherWatch(launch, pid, self._stop.on_launcher_lost)
        run = read_run(self._argv, launch, program=self._program)
        if self._listener is not None:
            self._listener.listen_to(signal.Signals[run.config.failures.exit_signal])
        self._reports.join()
        launch, self._stop.watch = start_watch(run, launch, self._launcher)
        if self._stop.watch is not None:
            self._reports.claims = self._stop.watch.claims
        train(run, launch, self._stop)

    def _say(self, text: str) -> None:
        """Print a line, unless another rank prints it."""
        with self._reports.line(text) as prints:
            if prints:
                print(f"{self._program.name}: {text}", file=sys.stderr, flush=True)

    def _end(self, code: int) -> None:
        """End the process at once."""
        self._reports.wait_for_line(2.0)  # the main thread may be about to print its line
        os._exit(code)


def main(
    argv: Sequence[str], environment: Mapping[str, str], *, program: Program = PRETRAIN_GPT
) -> int:
    """Run the command and return this process's exit code; see `RunProcess`."""
    return RunProcess(argv, environment, program).run()


def run_program(program: Program) -> None:
    """Run an entry script in this process and exit."""
    go_on_without_streams(program.name)
    code = main(sys.argv[1:], os.environ, program=program)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: process-group threads whose peer has died would block the interpreter's exit.
    os._exit(code)


if __name__ == "__main__":
    run_program(PRETRAIN_GPT)
