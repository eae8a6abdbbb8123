# SPDX-License-Identifier: Apache-2.0
"""Kernels whose compiled code has one fault each.

Prints {"faults": {kernel: faults}, "outcomes": [...]} as JSON. The outcomes are of three launches:
with an empty cache, the same launch with a filled cache, and an invalid launch. Needs no GPU.
`test_code_faults.py` runs this without TRITON_INTERPRET, under which nothing compiles.
"""

import json
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl

from tools.gpu_compile import compiler
from tools.gpu_compile.launch import Launch


@triton.jit
def load_tile(ptr, rows: tl.constexpr, columns: tl.constexpr):
    """Load a matrix."""
    return tl.load(ptr + tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :])


@triton.jit
def store_tile(ptr, tile, rows: tl.constexpr, columns: tl.constexpr):
    """Store a matrix."""
    tl.store(ptr + tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :], tile)


@triton.jit
def chained_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr, TRANSPOSES: tl.constexpr):
    """Multiply the product a b, or its transpose, by b."""
    a, b = load_tile(a_ptr, SIZE, SIZE), load_tile(b_ptr, SIZE, SIZE)
    product = tl.dot(a, b).to(a.dtype)
    if TRANSPOSES:
        product = tl.trans(product)
    store_tile(c_ptr, tl.dot(product, b), SIZE, SIZE)


@triton.jit
def summed_kernel(a_ptr, b_ptr, c_ptr, steps, SIZE: tl.constexpr):
    """Add two products per step to one accumulator."""
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(steps):
        a = load_tile(a_ptr + step * SIZE * SIZE, SIZE, SIZE)
        b = load_tile(b_ptr + step * SIZE * SIZE, SIZE, SIZE)
        total = tl.dot(a, b, total)
        total = tl.dot(b, a, total)
    store_tile(c_ptr, total, SIZE, SIZE)


TYPES = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "steps": "i32"}
#: name: kernel, constants, warps, architecture
CASES = {
    "no fault": (chained_kernel, {"SIZE": 64, "TRANSPOSES": False}, 4, 90),
    "duplicated tile": (chained_kernel, {"SIZE": 64, "TRANSPOSES": False}, 8, 90),
    "transposed accumulator": (chained_kernel, {"SIZE": 64, "TRANSPOSES": True}, 4, 90),
    "mma.sync of 64 rows": (chained_kernel, {"SIZE": 64, "TRANSPOSES": False}, 2, 90),
    "accumulator read early": (summed_kernel, {"SIZE": 128}, 4, 100),
}


def launch_of(kernel, constants: dict, warps: int) -> Launch:
    """Return the launch of a kernel."""
    names = kernel.arg_names
    return Launch(
        module=kernel.fn.__module__,
        kernel=kernel.fn.__name__,
        signature=[(name, TYPES.get(name, "constexpr")) for name in names],
        constants=[([names.index(name)], value) for name, value in constants.items()],
        attributes=[
            ([index], [["tt.divisibility", 16]])
            for index, name in enumerate(names)
            if name.endswith("_ptr")
        ],
        options={"num_warps": warps},
    )


def faults(kernel, constants: dict, warps: int, architecture: int) -> dict[str, int]:
    """Compile a kernel and return its faults."""
    texts = compiler.texts_of(launch_of(kernel, constants, warps), architecture)
    return compiler.code_faults(
        texts["ttgir"], texts["ptx"], architecture=architecture, warps=warps
    )


def outcomes(folder: Path) -> list[compiler.Outcome]:
    """Compile a valid launch twice with one cache, then an invalid launch."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    kernel, constants, warps, architecture = CASES["no fault"]
    launch = launch_of(kernel, constants, warps)
    results = []
    for assembler in (
        ptxas,
        Path("/no/ptxas"),
    ):  # the second time, the cache makes ptxas unnecessary
        cached_compiler = compiler.Compiler(compiler.Cache(folder), {"12.8": assembler})
        results.append(cached_compiler.outcome(launch, architecture))
    invalid = launch_of(kernel, constants | {"SIZE": 63}, warps)
    return [*results, cached_compiler.outcome(invalid, architecture)]


if __name__ == "__main__":
    faults_by_kernel = {name: faults(*case) for name, case in CASES.items()}
    with tempfile.TemporaryDirectory() as temporary:
        report = {"faults": faults_by_kernel, "outcomes": outcomes(Path(temporary))}
        json.dump(report, sys.stdout)
