# SPDX-License-Identifier: Apache-2.0
"""Run a module as a program with the coverage recorder, for torchrun jobs.

python -m tests.support.run_recorded MODULE ARGUMENTS
"""

from __future__ import annotations

import runpy
import sys

from tests.support.coverage_recorder import install

if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
