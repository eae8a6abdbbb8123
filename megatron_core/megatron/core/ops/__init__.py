# SPDX-License-Identifier: Apache-2.0
"""Local maths: every op is a plain-torch definition, a Triton kernel and a dispatcher.

`ops/<name>/reference.py` is the specification and the CPU path, `ops/<name>/triton.py` the kernel
that is compared with it, and `ops/<name>/__init__.py` checks arguments and picks one by device.
Nothing here knows about ranks, groups or weight handles.
"""
