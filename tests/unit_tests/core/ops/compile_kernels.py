# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels ahead of time; print their resources as JSON. Needs no GPU.

    python tests/unit_tests/core/ops/compile_kernels.py [--all] [--only PART] [--list]

Kernels are described in `aot/<part>_kernels.py`; see `aot/description.py` for how to add one.
`test_aot_kernels.py` runs this without TRITON_INTERPRET, under which nothing compiles.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.unit_tests.core.ops.aot.description import Description
from tools.gpu_compile.compiler import code_faults

DESCRIPTIONS_FOLDER = Path(__file__).with_name("aot")


def descriptions(only: str | None = None) -> list[Description]:
    """Return the descriptions of all parts, or of the part `only`."""
    kernels: list[Description] = []
    for path in sorted(DESCRIPTIONS_FOLDER.glob("*_kernels.py")):
        if only in (None, path.stem.removesuffix("_kernels")):
            module = importlib.import_module(f"tests.unit_tests.core.ops.aot.{path.stem}")
            kernels += module.KERNELS
    names = [description.name for description in kernels]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"described twice: {sorted(duplicates)}; give each a label")
    return kernels


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and stack bytes (spills included) of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def compile_for(description: Description, architecture: int) -> Any:
    """Compile one kernel with the constants and options of its launch."""
    return triton.compile(
        ASTSource(
            fn=description.kernel,
            signature=description.signature(),
            constexprs=description.constants,
            attrs=description.attributes(),
        ),
        target=GPUTarget("cuda", architecture, 32),
        options=description.options,
    )


def needs(compiled: Any) -> dict[str, int]:
    """Return the registers, stack bytes and shared bytes of a compiled kernel."""
    registers, stack = resources(compiled.asm["cubin"])
    return {
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": compiled.metadata.shared,
    }


def main() -> None:
    """Print {"triton": version, "described": all names, "kernels": {kernel/sm_NN: its resources},
    "faults": {kernel/sm_NN: the faults that `tools.gpu_compile.compiler` reports}}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--all", action="store_true", help="compile for every architecture, not only the quick ones"
    )
    parser.add_argument("--only", help="one part: the name of its file before _kernels.py")
    parser.add_argument("--list", action="store_true", help="list the kernels without compiling")
    options = parser.parse_args()
    described = descriptions(options.only)
    needs_by_kernel, faults = {}, {}
    for description in described if not options.list else ():
        for architecture in description.architectures if options.all else description.quick:
            compiled, name = (
                compile_for(description, architecture),
                f"{description.name}/sm_{architecture}",
            )
            needs_by_kernel[name] = needs(compiled)
            texts = (compiled.asm[kind] for kind in ("ttgir", "ptx"))
            warps = description.options["num_warps"]
            faults[name] = code_faults(*texts, architecture=architecture, warps=warps)
    names = [
        f"{description.name}/sm_{n}" for description in described for n in description.architectures
    ]
    report = {"triton": triton.__version__, "described": names, "kernels": needs_by_kernel}
    report["faults"] = faults
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
