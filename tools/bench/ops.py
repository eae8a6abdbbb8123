# SPDX-License-Identifier: Apache-2.0
"""Time ops and layers against their peers, in turns, and against the rooflines of measured rates.

python -m tools.bench.ops                       everything on this GPU, or on the CPU without one
python -m tools.bench.ops --only norm swiglu    some ops
python -m tools.bench.ops --decode              kernels of decode steps, on a GPU
python -m tools.bench.ops --dtype bfloat16      on a CPU: one dtype instead of fp32 and bf16
python -m tools.bench.ops --profile --only swiglu    where our time goes, by operator
python -m tools.bench.ops --rehearse            tiny, on a CPU, in Triton's interpreter

`cases.py` says how an op is added.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tools.bench import (
    attention_cases,
    decode_cases,
    expert_cases,
    moe_layer_cases,
    pointwise_cases,
    recurrence_cases,
    recurrent_layer_cases,
)
from tools.bench.cases import Builder, builders
from tools.bench.harness import Bench, no_device, options_of
from tools.bench.table import Row

#: Modules that register cases, in the order in which they run.
MODULES = (
    recurrence_cases,
    pointwise_cases,
    attention_cases,
    expert_cases,
    recurrent_layer_cases,
    moe_layer_cases,
    decode_cases,
)
#: The ops of a quick rehearsal.
QUICK = {"gpu": ("norm",), "decode": ("1 row",)}
CPU_DTYPES = ("float32", "bfloat16")


def selected(
    bench: Bench, only: list[str] | None, *, decode: bool = False
) -> list[tuple[str, Builder]]:
    """Return the builders that a bench runs, by name."""
    order = [module.__name__ for module in MODULES]
    kind = "decode" if decode else "cpu" if bench.is_cpu else "gpu"
    registered = builders(kind)
    if not decode:  # a bench may run out of time
        by_module = sorted(registered.items(), key=lambda entry: order.index(entry[1].__module__))
        registered = dict(by_module)
    names = only or (QUICK[kind] if bench.quick and bench.rehearse else registered)
    return [(name, registered[name]) for name in names if name in registered]


def rows(quick: bool) -> list[Row]:
    """Measure every op on the CPU, in fp32 and bf16; with `quick` in fewer rounds.

    Raises:
        RuntimeError: a case failed.
    """
    options = argparse.Namespace(rehearse=False, quick=quick, part=None, seconds=3600.0)
    table_rows = []
    for dtype in CPU_DTYPES:
        bench = Bench(f"ops, {dtype}", options, dtype=getattr(torch, dtype), on_cpu=True)
        bench.measure(selected(bench, None))
        if bench.problems:
            problems = "; ".join(f"{name}: {problem}" for name, problem in bench.problems.items())
            raise RuntimeError(f"{bench.name}: {problems}")
        table_rows += bench.rows
    return table_rows


def profile(bench: Bench, cases: list[tuple[str, Builder]]) -> None:
    """Print a profile of ten calls of our implementation of each case."""
    for _, build in cases:
        for case in build(bench):
            for _ in range(3):
                case.mcore()
            with torch.profiler.profile() as torch_profile:
                for _ in range(10):
                    case.mcore()
            averages = torch_profile.key_averages()
            print(case.name, averages.table(sort_by="self_cpu_time_total", row_limit=30), sep="\n")


def main() -> int:
    """Measure the selected cases and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({*builders("cpu"), *builders("gpu"), *builders("decode")})
    parser.add_argument("--only", nargs="+", choices=names, metavar="OP", help=", ".join(names))
    parser.add_argument("--dtype", choices=CPU_DTYPES, help="of a CPU; the default is both")
    parser.add_argument("--profile", action="store_true", help="profile ours instead of timing")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--decode", action="store_true", help="kernels of decode steps, on a GPU")
    options = options_of(parser)
    if options.decode and no_device(options, "ops --decode"):
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    on_cpu = not (options.rehearse or torch.cuda.is_available())
    dtypes = ([options.dtype] if options.dtype else CPU_DTYPES) if on_cpu else [None]
    exit_code = 0
    for dtype in dtypes:
        name = "kernels" if dtype is None else f"ops, {dtype}"
        name = "decode" if options.decode else name
        bench = Bench(name, options, dtype=dtype and getattr(torch, dtype))
        cases = selected(bench, options.only, decode=options.decode)
        if options.profile:
            profile(bench, cases)
        else:
            exit_code |= bench.run(cases)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
