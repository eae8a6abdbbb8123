# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels ahead of time and print what each needs, as JSON. No GPU is needed.

    python tests/unit_tests/core/ops/compile_kernels.py [--all] [--only PART] [--list]

Kernels are described in `aot/<part>_kernels.py`; see `aot/description.py` for how to add one. Run
by `test_aot_kernels.py` without TRITON_INTERPRET, which compilation does not survive.
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

PARTS = Path(__file__).with_name("aot")


def descriptions(only: str | None = None) -> list[Description]:
    """Collect the descriptions of all parts, or of one."""
    found: list[Description] = []
    for path in sorted(PARTS.glob("*_kernels.py")):
        if only in (None, path.stem.removesuffix("_kernels")):
            module = importlib.import_module(f"tests.unit_tests.core.ops.aot.{path.stem}")
            found += module.KERNELS
    names = [each.name for each in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"described twice: {sorted(twice)}; give each a label")
    return found


def resources(cubin: bytes) -> tuple[int, int]:
    """Read registers a thread and stack bytes (spills included) from a compiled kernel."""
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
    """Compile one kernel as its launch would."""
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
    """Print {"triton": version, "described": all names, "kernels": {kernel/sm_NN: its needs},
    "faults": {kernel/sm_NN: what `tools.gpu_compile.compiler` finds in its code}}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--all", action="store_true", help="for every architecture of each, not the quick"
    )
    parser.add_argument("--only", help="one part: the name of its file before _kernels.py")
    parser.add_argument("--list", action="store_true", help="compile nothing")
    options = parser.parse_args()
    described = descriptions(options.only)
    found, faults = {}, {}
    for each in described if not options.list else ():
        for architecture in each.architectures if options.all else each.quick:
            compiled, name = compile_for(each, architecture), f"{each.name}/sm_{architecture}"
            found[name] = needs(compiled)
            texts = (compiled.asm[kind] for kind in ("ttgir", "ptx"))
            warps = each.options["num_warps"]
            faults[name] = code_faults(*texts, architecture=architecture, warps=warps)
    names = [f"{each.name}/sm_{n}" for each in described for n in each.architectures]
    result = {"triton": triton.__version__, "described": names, "kernels": found}
    result["faults"] = faults
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
