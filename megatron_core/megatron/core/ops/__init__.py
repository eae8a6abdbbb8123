# SPDX-License-Identifier: Apache-2.0
"""Local ops, one package each, without ranks, process groups or weight handles.

    ops/<name>/__init__.py  checks the arguments and chooses an implementation by device
    ops/<name>/naive.py     the equations in plain torch: the specification, forward only
    ops/<name>/cpu.py       the optimised plain torch, with a backward of its own
    ops/<name>/triton.py    the kernels

`cpu` ("reference" in the argument `implementation`) runs on CPUs, and on GPUs wherever no kernel
does. Tests compare `cpu` and `triton`, forward and gradients, with `naive` under autograd. An op
whose equations are already optimal in plain torch has no `cpu`.
"""
