# SPDX-License-Identifier: Apache-2.0
"""Another module as a program, with a witness of what it trains: for jobs of torchrun.

python -m tests.support.witnessed MODULE ARGUMENTS
"""

from __future__ import annotations

import runpy
import sys

from tests.support.witness import install

if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
