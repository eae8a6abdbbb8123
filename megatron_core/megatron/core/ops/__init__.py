# SPDX-License-Identifier: Apache-2.0
"""Local maths: every op is a plain-torch definition, a Triton kernel and a dispatcher.

`ops/<name>/__init__.py` checks arguments and picks an implementation by device: plain torch,
which is the specification and the CPU's path (there, or in `reference.py` where the kernel builds
on it), or the kernel in `ops/<name>/triton.py`, which is compared with it. Nothing here knows about
ranks, groups or weight handles.
"""
