# SPDX-License-Identifier: Apache-2.0
"""Kernel times on a GPU, against peers in the same turns and against rooflines of measured rates.

python -m tools.bench.gpu_kernels                 everything, the first cases first if time is short
python -m tools.bench.gpu_kernels --rehearse      tiny, on a CPU, in Triton's interpreter
"""

from __future__ import annotations

import argparse
import sys

from tools.bench import gpu_experts, gpu_pointwise, gpu_recurrences
from tools.bench.gpu_bench import Bench, no_device, options_of

CASES = (
    ("delta rule", gpu_recurrences.qwen),
    ("norm", gpu_pointwise.norm),
    ("norm with residual", gpu_pointwise.norm_with_residual),
    ("swiglu", gpu_pointwise.swiglu),
    ("rope", gpu_pointwise.rope),
    ("state-space dual", gpu_recurrences.dual),
    ("prologue", gpu_recurrences.prologue),
    ("epilogue", gpu_recurrences.epilogue),
    ("delta rule, 8,192 tokens", gpu_recurrences.qwen_short),
    ("delta rule, packed", gpu_recurrences.qwen_packed),
    ("delta rule, split", gpu_recurrences.split),
    ("attention", gpu_pointwise.causal_attention),
    ("attention, packed", gpu_pointwise.packed_attention),
    ("cross entropy", gpu_pointwise.cross_entropy),
    ("experts", gpu_experts.products),
    ("permutation", gpu_pointwise.permutation),
    ("experts", gpu_pointwise.expert_products),
)
QUICK = ("norm",)


def main() -> int:
    """Measure and return the exit code."""
    options = options_of(
        argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
    )
    if no_device(options, "gpu_kernels"):
        return 0
    cases = [(name, case) for name, case in CASES if not options.quick or name in QUICK]
    return Bench("kernels", options).run(cases)


if __name__ == "__main__":
    sys.exit(main())
