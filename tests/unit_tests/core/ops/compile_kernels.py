# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels ahead of time and print what each needs, as JSON.

    python tests/unit_tests/core/ops/compile_kernels.py

No GPU is needed. Run by `test_aot_kernels.py` without TRITON_INTERPRET, which compilation does
not survive.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.core.ops.attention import kernels as attention
from megatron.core.ops.attention.triton import BACKWARD_WARPS, FORWARD_WARPS, tile_shape
from megatron.core.ops.dropout import triton as dropout
from megatron.core.ops.layernorm import triton as layernorm
from megatron.core.ops.linear_cross_entropy import triton as loss
from megatron.core.ops.permutation import triton as permutation
from megatron.core.ops.rmsnorm import triton as rmsnorm
from megatron.core.ops.rope import triton as rope
from megatron.core.ops.swiglu import triton as swiglu

MASKS = {"CAUSAL": True, "HAS_WINDOW": True, "HAS_DOCUMENTS": True}
ATTENTION = MASKS | tile_shape(128)
WIDE_ATTENTION = MASKS | tile_shape(256)
# kernel, compile-time constants, compute capabilities, warps
KERNELS = [
    (
        attention.attention_forward_kernel,
        ATTENTION | {"HAS_SINKS": True},
        (90, 100),
        FORWARD_WARPS,
    ),
    (attention.query_gradient_kernel, ATTENTION, (90,), BACKWARD_WARPS),
    (attention.key_gradient_kernel, ATTENTION, (90, 100), BACKWARD_WARPS),
    (
        attention.attention_forward_kernel,
        WIDE_ATTENTION | {"HAS_SINKS": True},
        (90,),
        FORWARD_WARPS,
    ),
    (attention.query_gradient_kernel, WIDE_ATTENTION, (90,), BACKWARD_WARPS),
    (attention.key_gradient_kernel, WIDE_ATTENTION, (90,), BACKWARD_WARPS),
    (rmsnorm.rms_norm_forward_kernel, {"HAS_RESIDUAL": True, "BLOCK": 4096}, (90,), 8),
    (rmsnorm.rms_norm_backward_kernel, {"HAS_GRAD_TOTAL": True, "BLOCK": 4096}, (90,), 8),
    (layernorm.layer_norm_backward_kernel, {"HAS_GRAD_TOTAL": True, "BLOCK": 4096}, (90,), 8),
    (
        rope.rope_kernel,
        {"PER_SAMPLE": False, "INTERLEAVED": False, "HEADS": 32, "PAIRS": 64, "REST": 0},
        (90,),
        4,
    ),
    (swiglu.gated_backward_kernel, {"GELU": False, "BLOCK": 1024}, (90,), 4),
    (dropout.dropout_kernel, {"GROUP": 4, "BLOCK": 1024}, (90,), 4),
    (loss.chunk_statistics_kernel, {"BLOCK": 2048}, (90,), 8),
    (permutation.take_rows_kernel, {"BLOCK": 1024}, (90,), 4),
    (
        permutation.sum_rows_kernel,
        {"HAS_WEIGHTS": True, "COPIES": 8, "BLOCK": 512},
        (90,),
        4,
    ),
    (permutation.sum_rows_backward_kernel, {"COPIES": 8, "BLOCK": 512}, (90,), 4),
]
# Arguments that are not bf16 pointers (by ending) or 32-bit integers.
TYPES = {
    "rstd_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "statistics_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
    "maximum_ptr": "*fp32",
    "sum_ptr": "*fp32",
    "target_ptr": "*fp32",
    "documents_ptr": "*i32",
    "query_documents_ptr": "*i32",
    "targets_ptr": "*i64",
    "rows_ptr": "*i64",
    "columns_ptr": "*i64",
    "places_ptr": "*i64",
    "slots_ptr": "*i64",
    "weights_ptr": "*fp32",
    "d_weights_ptr": "*fp32",
    "mix": "i64",
    "scale": "fp32",
    "eps": "fp32",
    "offset": "fp32",
    "sign": "fp32",
}
# Besides pointers and strides, what is a multiple of 16 in any real model; as the launcher says.
DIVISIBLE = ("features", "width", "row_stride", "queries", "keys")


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


def main() -> None:
    """Compile everything; print {kernel/sm_NN: {"registers", "stack_bytes", "shared_bytes"}}.

    Kernels of attention are named with their features.
    """
    found = {}
    for kernel, constants, capabilities, warps in KERNELS:
        features = f" {constants['FEATURES']}" if "FEATURES" in constants else ""
        signature, attributes = {}, {}
        for index, name in enumerate(kernel.arg_names):
            fallback = "*bf16" if name.endswith("_ptr") else "i32"
            signature[name] = "constexpr" if name in constants else TYPES.get(name, fallback)
            if signature[name].startswith("*") or name in DIVISIBLE or "_stride_" in name:
                attributes[(index,)] = [["tt.divisibility", 16]]
        for capability in capabilities:
            compiled = triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": warps, "num_stages": 2},
            )
            registers, stack = resources(compiled.asm["cubin"])
            found[f"{kernel.__name__}{features}/sm_{capability}"] = {
                "registers": registers,
                "stack_bytes": stack,
                "shared_bytes": compiled.metadata.shared,
            }
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
