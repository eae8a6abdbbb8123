# SPDX-License-Identifier: Apache-2.0
"""Budgets of registers, stack and shared memory per compiled kernel and release of Triton.

    python tests/unit_tests/core/ops/kernel_budget.py [--only PART] [--raise NAME ...]
                                                      [--triton FOLDER]

compiles the kernels and writes the record. New kernels and smaller numbers are always written,
larger numbers only for the kernels named with --raise. Registers and stack bytes are per thread.
The stack holds spilled registers, so a larger stack means a slower kernel. `kernel_budget.json` is
the record of the pinned release. --triton FOLDER writes `kernel_budget_<release>.json` for another
release, installed with `pip install --target FOLDER triton==<release>`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

RECORD = Path(__file__).with_name("kernel_budget.json")
SHARED_BYTES = 227 << 10  # the limit of one block on both architectures
EMPTY = 8  # a kernel with fewer registers is empty: the compiler removed its body
REGISTERS = 4  # tolerated decrease before the record must be rewritten
FIELDS = ("registers", "stack_bytes", "shared_bytes")
Needs = Mapping[str, Mapping[str, int]]


def parts() -> list[str]:
    """Return the names of the parts in aot/."""
    files = Path(__file__).with_name("aot").glob("*_kernels.py")
    return sorted(path.stem.removesuffix("_kernels") for path in files)


def record_path(release: str) -> Path:
    """Return the path of the record for a release of Triton; the file may be missing."""
    pinned = json.loads(RECORD.read_text("utf-8"))["triton"]
    return RECORD if release == pinned else RECORD.with_name(f"{RECORD.stem}_{release}.json")


def compiled(*arguments: str, triton: Path | None = None) -> dict:
    """Run `compile_kernels.py` in a process with an empty cache; return the JSON it prints.

    Args:
        arguments: command-line arguments.
        triton: folder of another release of Triton than the installed one.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"}
        environment.pop("TRITON_INTERPRET", None)  # nothing compiles under the interpreter
        if triton is not None:
            folders = (str(triton), environment.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        run = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
    if run.returncode:
        raise RuntimeError(f"compile_kernels.py: {run.stderr[-4000:]}")
    return json.loads(run.stdout)


def problems(needs: Needs, record: Needs, *, same_release: bool) -> list[str]:
    """Return how the kernels differ from the record.

    Args:
        needs: resources of the compiled kernels, by kernel/sm_NN.
        record: their budgets.
        same_release: whether the recorded release of Triton compiled the kernels. Another release
            allocates differently: it may use a tenth more registers and any shared memory that
            launches, but must not spill where the recorded release did not.
    """
    messages = []
    for name, used in needs.items():
        limit = record.get(name)
        if used["shared_bytes"] > SHARED_BYTES:
            messages.append(f"{name}: {used['shared_bytes']} shared bytes do not launch")
        if used["registers"] < EMPTY:
            messages.append(f"{name}: {used['registers']} registers: nothing was compiled")
        if limit is None:
            messages.append(f"{name}: no record; run kernel_budget.py")
        elif same_release:
            messages += [
                f"{name}: {used[x]} {x}, more than the {limit[x]} recorded"
                for x in FIELDS
                if used[x] > limit[x]
            ]
            messages += [
                f"{name}: {used[x]} {x}, less than the {limit[x]} recorded: run kernel_budget.py"
                for x, room in zip(FIELDS, (REGISTERS, 0, 0), strict=True)
                if used[x] < limit[x] - room
            ]
        elif used["registers"] > limit["registers"] * 1.1 + 2 or (
            used["stack_bytes"] and not limit["stack_bytes"]
        ):
            messages.append(f"{name}: {dict(used)}, far more than the {dict(limit)} recorded")
    return messages


def merged(
    needs: Needs, record: Needs, *, described: Collection[str], raising: Sequence[str] = ()
) -> dict[str, dict[str, int]]:
    """Return the new record, sorted by name.

    Args:
        needs: resources of the compiled kernels.
        record: the previous record.
        described: names of all kernels; other entries leave the record.
        raising: kernels, with or without /sm_NN, whose numbers may grow.

    Raises:
        ValueError: a number would grow.
    """
    growing = {
        name: (dict(record[name]), dict(kernel_needs))
        for name, kernel_needs in needs.items()
        if name in record
        and not {name, name.split("/")[0]} & set(raising)
        and any(kernel_needs[x] > record[name][x] for x in FIELDS)
    }
    if growing:
        raise ValueError(
            f"the record only shrinks, these kernels grew: {growing}; fix them, or name each"
            " with --raise and say why in the commit"
        )
    retained = {
        name: dict(kernel_needs) for name, kernel_needs in record.items() if name in described
    }
    return dict(
        sorted(
            (retained | {name: dict(kernel_needs) for name, kernel_needs in needs.items()}).items()
        )
    )


def write(path: Path, triton: str, kernels: Needs) -> None:
    """Write a record with one line per kernel."""
    lines = [f"  {json.dumps(name)}: {json.dumps(used)}" for name, used in kernels.items()]
    text = (
        f'{{\n "triton": {json.dumps(triton)},\n "kernels": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    )
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Compile for every architecture and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one part: the name of its file in aot/ before _kernels.py")
    parser.add_argument("--raise", dest="raising", action="append", default=[], metavar="NAME")
    parser.add_argument("--new-release", action="store_true", help="move to the installed Triton")
    parser.add_argument("--triton", type=Path, help="the folder of another release of Triton")
    options = parser.parse_args()
    if options.only not in (None, *parts()):
        parser.exit(2, f"kernel_budget: no part is named {options.only!r}: {' '.join(parts())}\n")
    if options.triton is not None and not (options.triton / "triton").is_dir():
        parser.exit(
            2,
            f"kernel_budget: no Triton in {options.triton}: pip install --no-deps --target"
            f" {options.triton} triton==RELEASE\n",
        )
    only = ["--only", options.only] if options.only else []
    report = compiled("--all", *only, triton=options.triton)
    described = report["described"] if options.only is None else compiled("--list")["described"]
    path = RECORD if options.triton is None else record_path(report["triton"])
    previous = (
        json.loads(path.read_text("utf-8"))
        if path.exists()
        else {"triton": report["triton"], "kernels": {}}
    )
    if previous["triton"] != report["triton"] and (options.only or not options.new_release):
        parser.error(
            f"the record is of Triton {previous['triton']}, this is {report['triton']}: install"
            " that, or move all of it with --new-release"
        )
    record = {} if options.new_release else previous["kernels"]
    try:
        merged_record = merged(
            report["kernels"], record, described=described, raising=options.raising
        )
    except ValueError as error:
        parser.error(str(error))
    write(path, report["triton"], merged_record)


if __name__ == "__main__":
    main()
