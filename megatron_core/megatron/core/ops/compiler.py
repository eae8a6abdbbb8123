# SPDX-License-Identifier: Apache-2.0
"""Which Triton and which ptxas compile the kernels, and which of them are known to be wrong.

On Hopper two faults are known. Triton 3.4.0 to 3.7.0 multiplies the transpose of an accumulator
wrongly (github.com/fla-org/flash-linear-attention issue 640, pull request 983). ptxas before 13.3
may overwrite registers that a running wgmma still reads (github.com/triton-lang/triton issue 9433,
pull request 11781). `python -m tools.gpu_compile` looks for both in the code of every kernel.
"""

from __future__ import annotations

import re

import torch

from megatron.core.ops.dispatch import ptxas_version, triton_version

HOPPER = 9
#: Releases of Triton [first, fixed) and of ptxas below the fixed one that are known to be wrong.
WRONG_TRITON = ((3, 4, 0), (3, 7, 1))
FIXED_PTXAS = (13, 3)
PTXAS_WHEEL = "nvidia-cuda-nvcc==13.3.73"


def compiler_faults(major: int, triton: str, ptxas: str | None) -> list[str]:
    """Return what is known to be wrong with releases on an architecture, with the one to install.

    Args:
        major: of the compute capability.
        triton, ptxas: releases.
    """
    if major != HOPPER:
        return []
    faults = []
    first, fixed = WRONG_TRITON
    if first <= _numbers(triton, 3) < fixed:
        release = ".".join(map(str, fixed))
        faults.append(
            f"Triton {triton} multiplies transposed accumulators wrongly on Hopper: pip install"
            f" triton=={release}"
        )
    if ptxas is not None and _numbers(ptxas, 2) < FIXED_PTXAS:
        faults.append(
            f"ptxas {ptxas} may overwrite the operands of a running wgmma: pip install"
            f" {PTXAS_WHEEL} and set TRITON_PTXAS_PATH to its ptxas"
        )
    return faults


def explain(device: torch.device) -> str | None:
    """Return what compiles the kernels of a device and its known faults; None without kernels."""
    triton = triton_version()
    if device.type != "cuda" or triton is None:
        return None
    major = torch.cuda.get_device_capability(device)[0]
    ptxas = ptxas_version(major)
    line = f"Triton {triton}, ptxas {ptxas or 'absent'}"
    if faults := compiler_faults(major, triton, ptxas):
        line += f"; {'; '.join(faults)}; make gpu-compile finds neither fault in our kernels"
    return line


def _numbers(version: str, count: int) -> tuple[int, ...]:
    """Return the first numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:count]))
