# SPDX-License-Identifier: Apache-2.0
"""Record the launches of GPU benches and of every candidate of a `Launches`, without a GPU.

    python -m tools.gpu_compile.record_benches launches.jsonl

Candidates are launched as `tools.bench.tune_kernels` tries them, at the sizes of real models but
with few tokens, on which no launch depends. A launch with all constants and options of the
candidate is named after it; the launches of other kernels are a bench's. The cases of
`tools.bench.ops` run at their own sizes on tensors without memory. What fails is printed,
and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.compile_only import Recorded, replace_launches
from tools.gpu_compile.launch import BENCH

if TYPE_CHECKING:
    from megatron.core.ops.launches import Launches
    from tools.bench.cases import Builder
    from tools.bench.harness import Bench
    from tools.bench.trials import Trial

#: Cases that read values on the host, which tensors without memory lack. The trials and tests/gpu
#: launch their kernels.
READ_VALUES = ("cross entropy", "attention, packed", "experts", "grouped products")


def trials(recorded: Recorded) -> Iterator[str]:
    """Launch every candidate of every trial; yields problems."""
    from tools.bench.trials import all_launches
    from tools.bench.tune_kernels import TRIALS

    for trial in TRIALS:
        for name in trial.launches:
            launches = all_launches()[name]
            for shape in trial.shapes:
                for candidate in launches.candidates:
                    default = candidate == launches.default
                    recorded.candidate = {} if default else candidate
                    for dtype in (torch.float32, torch.bfloat16)[0 if default else 1 :]:
                        what = f"{name} {shape} {candidate}"
                        yield from _problems(
                            what, partial(_launch, trial, shape, launches, candidate, dtype)
                        )
    recorded.candidate = {}


def _launch(
    trial: Trial,
    shape: Mapping[str, int],
    launches: Launches,
    candidate: Mapping[str, int],
    dtype: torch.dtype,
) -> None:
    """Launch one candidate like the tuner."""
    from tools.bench.trials import started_with

    generator = torch.Generator().manual_seed(1)
    problem = trial.build(
        lambda *sizes: torch.randn(sizes, generator=generator), trial.tokens[0], **shape
    )
    with started_with(launches, candidate):
        problem.call(dtype, trial.launches[launches.name])()


def kernel_benches() -> Iterator[str]:
    """Run the cases of `tools.bench.ops`, each of ours and no peer; yields problems."""
    from tools.bench import attention_cases, cases, expert_cases, harness, ops, recurrence_cases

    options = argparse.Namespace(rehearse=False, quick=False, part=None, seconds=1e9)
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(torch, "compile", lambda function, **_: function))
        for module in (cases, attention_cases, expert_cases, recurrence_cases):
            stack.enter_context(mock.patch.object(module, "require_same"))
        bench = harness.Bench("kernels", options)
        bench.is_cpu, bench.implementation = False, "triton"
        for name, build in ops.selected(bench, None):
            if name not in READ_VALUES:
                yield from _problems(name, partial(_run_mcore, bench, build))


def _run_mcore(bench: Bench, build: Builder) -> None:
    """Run our implementation of every case of a builder."""
    for case in build(bench):
        case.mcore()


def _problems(name: str, run: Callable[[], None]) -> Iterator[str]:
    """Run a block; yield a list with its exception."""
    try:
        run()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        yield f"{name}: {type(error).__name__}: {lines[0]}"


def main() -> int:
    """Record and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    recorded = Recorded(parser.parse_args().path)
    recorded.source = BENCH
    replace_launches(recorded.run)
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    problems = [*trials(recorded), *kernel_benches()]
    recorded.write()
    for problem in problems:
        print(f"problem: {problem}")
    print(f"record_benches: {len(recorded.launches)} launches, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
