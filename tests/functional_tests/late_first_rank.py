# SPDX-License-Identifier: Apache-2.0
"""The entry point on several ranks, where rank 0 is the last to read its options."""

from __future__ import annotations

import os
import sys
import time

from megatron.training.pretrain_gpt import main

if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        time.sleep(1.0)
    code = main(sys.argv[1:], os.environ)
    sys.stderr.flush()
    os._exit(code)
