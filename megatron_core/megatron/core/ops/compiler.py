# SPDX-License-Identifier: Apache-2.0
"""Versions of Triton and ptxas that compile the kernels, and releases with known bugs.

Two bugs affect Hopper. Triton 3.4.0 to 3.7.0 multiplies the transpose of an accumulator wrongly
(github.com/fla-org/flash-linear-attention issue 640, pull request 983). ptxas before 13.3 may
overwrite registers that a running wgmma still reads (github.com/triton-lang/triton issue 9433,
pull request 11781). `python -m tools.gpu_compile` searches the code of every kernel for both.
"""

from __future__ import annotations

import re

import torch

from megatron.core.ops.backend_choice import ptxas_version, triton_version

HOPPER = 9
#: Releases with known bugs: Triton from the first to below the second, ptxas below `FIXED_PTXAS`.
BUGGY_TRITON = ((3, 4, 0), (3, 7, 1))
FIXED_PTXAS = (13, 3)
PTXAS_WHEEL = "nvidia-cuda-nvcc==13.3.73"


def compiler_faults(major: int, triton: str, ptxas: str | None) -> list[str]:
    """Return the known bugs of compiler releases on an architecture, each with its fix.

    Args:
        major: major version of the compute capability.
        triton, ptxas: releases; ptxas is None if there is none.
    """
    if major != HOPPER:
        return []
    faults = []
    introduced, fixed = BUGGY_TRITON
    if introduced <= _version_tuple(triton, 3) < fixed:
        release = ".".join(map(str, fixed))
        faults.append(
            f"Triton {triton} multiplies transposed accumulators wrongly on Hopper: pip install"
            f" triton=={release}"
        )
    if ptxas is not None and _version_tuple(ptxas, 2) < FIXED_PTXAS:
        faults.append(
            f"ptxas {ptxas} may overwrite the operands of a running wgmma: pip install"
            f" {PTXAS_WHEEL} and set TRITON_PTXAS_PATH to its ptxas"
        )
    return faults


def explain(device: torch.device) -> str | None:
    """Return the compilers of a device's kernels and their known bugs; None if it runs none."""
    triton = triton_version()
    if device.type != "cuda" or triton is None:
        return None
    major = torch.cuda.get_device_capability(device)[0]
    ptxas = ptxas_version(major)
    line = f"Triton {triton}, ptxas {ptxas or 'absent'}"
    if faults := compiler_faults(major, triton, ptxas):
        line += f"; {'; '.join(faults)}; make gpu-compile finds neither fault in our kernels"
    return line


def _version_tuple(version: str, count: int) -> tuple[int, ...]:
    """Return the first `count` components of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:count]))
