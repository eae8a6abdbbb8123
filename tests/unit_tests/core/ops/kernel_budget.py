# SPDX-License-Identifier: Apache-2.0
"""What each compiled kernel may take, one record per release of Triton; a record only shrinks.

    python tests/unit_tests/core/ops/kernel_budget.py [--only PART] [--raise NAME ...]
                                                      [--triton FOLDER]

compiles the kernels and writes the record: new kernels and smaller numbers at once, larger ones
only for the kernels that are named. Registers and stack bytes are of a thread; a stack is spilt
registers, so more of it is a slower kernel. `kernel_budget.json` is the record of the pinned
release. `kernel_budget_<release>.json` is that of another release, written with --triton, the
folder that it is installed in (`pip install --target FOLDER triton==<release>`).
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
SHARED_BYTES = 227 << 10  # what one block may use on both architectures
EMPTY = 8  # a kernel with fewer registers than this does nothing: the compiler gave it up
REGISTERS = 4  # so many fewer than recorded are no reason to write the record anew
FIELDS = ("registers", "stack_bytes", "shared_bytes")
Needs = Mapping[str, Mapping[str, int]]


def parts() -> list[str]:
    """Return the parts that the kernels are described in."""
    files = Path(__file__).with_name("aot").glob("*_kernels.py")
    return sorted(path.stem.removesuffix("_kernels") for path in files)


def record_path(release: str) -> Path:
    """Return the record of a release of Triton, whether it exists or not."""
    pinned = json.loads(RECORD.read_text("utf-8"))["triton"]
    return RECORD if release == pinned else RECORD.with_name(f"{RECORD.stem}_{release}.json")


def compiled(*arguments: str, triton: Path | None = None) -> dict:
    """Run `compile_kernels.py` in a process and a cache of its own; return what it prints.

    Args:
        arguments: of the command line.
        triton: the folder of another release of Triton than the installed one.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"}
        environment.pop("TRITON_INTERPRET", None)  # compilation does not survive it
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


def problems(found: Needs, record: Needs, *, same_release: bool) -> list[str]:
    """Say what does not agree with the record.

    Args:
        found: what the kernels take, by kernel/sm_NN.
        record: what they may take.
        same_release: the record is of the very release of Triton that compiled them. Others
            allocate otherwise: they may take a tenth more registers and any shared memory that
            launches, but spill nothing where nothing was spilt.
    """
    said = []
    for name, used in found.items():
        limit = record.get(name)
        if used["shared_bytes"] > SHARED_BYTES:
            said.append(f"{name}: {used['shared_bytes']} shared bytes do not launch")
        if used["registers"] < EMPTY:
            said.append(f"{name}: {used['registers']} registers: nothing was compiled")
        if limit is None:
            said.append(f"{name}: no record; run kernel_budget.py")
        elif same_release:
            said += [
                f"{name}: {used[x]} {x}, more than the {limit[x]} recorded"
                for x in FIELDS
                if used[x] > limit[x]
            ]
            said += [
                f"{name}: {used[x]} {x}, less than the {limit[x]} recorded: run kernel_budget.py"
                for x, room in zip(FIELDS, (REGISTERS, 0, 0), strict=True)
                if used[x] < limit[x] - room
            ]
        elif used["registers"] > limit["registers"] * 1.1 + 2 or (
            used["stack_bytes"] and not limit["stack_bytes"]
        ):
            said.append(f"{name}: {dict(used)}, far more than the {dict(limit)} recorded")
    return said


def merged(
    found: Needs, record: Needs, *, described: Collection[str], raising: Sequence[str] = ()
) -> dict[str, dict[str, int]]:
    """Return the new record, sorted by name.

    Args:
        found: what the kernels take now.
        record: the old record.
        described: every kernel there is; others leave the record.
        raising: kernels, with or without /sm_NN, whose numbers may grow.

    Raises:
        ValueError: a number that would grow.
    """
    growing = {
        name: (dict(record[name]), dict(used))
        for name, used in found.items()
        if name in record
        and not {name, name.split("/")[0]} & set(raising)
        and any(used[x] > record[name][x] for x in FIELDS)
    }
    if growing:
        raise ValueError(
            f"the record only shrinks, these kernels grew: {growing}; mend them, or name each"
            " with --raise and say why in the commit"
        )
    kept = {name: dict(used) for name, used in record.items() if name in described}
    return dict(sorted((kept | {name: dict(used) for name, used in found.items()}).items()))


def write(path: Path, triton: str, kernels: Needs) -> None:
    """Write a record, one line a kernel."""
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
    found = compiled("--all", *only, triton=options.triton)
    described = found["described"] if options.only is None else compiled("--list")["described"]
    path = RECORD if options.triton is None else record_path(found["triton"])
    old = (
        json.loads(path.read_text("utf-8"))
        if path.exists()
        else {"triton": found["triton"], "kernels": {}}
    )
    if old["triton"] != found["triton"] and (options.only or not options.new_release):
        parser.error(
            f"the record is of Triton {old['triton']}, this is {found['triton']}: install that,"
            " or move all of it with --new-release"
        )
    record = {} if options.new_release else old["kernels"]
    try:
        new = merged(found["kernels"], record, described=described, raising=options.raising)
    except ValueError as error:
        parser.error(str(error))
    write(path, found["triton"], new)


if __name__ == "__main__":
    main()
