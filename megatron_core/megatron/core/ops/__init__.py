# SPDX-License-Identifier: Apache-2.0
"""Local ops: each has a plain PyTorch definition, a Triton kernel and a dispatcher.

`ops/<name>/__init__.py` checks arguments and chooses an implementation by device. The plain
PyTorch version is the specification and runs on CPUs; it stands in `__init__.py`, or in
`reference.py` if the kernel imports it. Tests compare the kernel in `ops/<name>/triton.py` with it.
Ops do not use ranks, process groups or weight handles.
"""
