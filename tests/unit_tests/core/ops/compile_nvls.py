# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of ops/nvls and print their PTX and SASS as JSON. Needs no GPU.

`test_nvls_code.py` runs this without TRITON_INTERPRET, under which nothing compiles.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from tests.unit_tests.core.ops.aot.description import Description
from tests.unit_tests.core.ops.aot.nvls_kernels import KERNELS
from tests.unit_tests.core.ops.compile_kernels import compile_for


def code(description: Description, architecture: int) -> dict[str, str]:
    """Return the PTX and SASS of a kernel."""
    compiled = compile_for(description, architecture)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"ptx": compiled.asm["ptx"], "sass": sass}


if __name__ == "__main__":
    architecture = int(sys.argv[1])
    code_by_name = {kernel.name: code(kernel, architecture) for kernel in KERNELS}
    json.dump({name.replace("_kernel", ""): x for name, x in code_by_name.items()}, sys.stdout)
