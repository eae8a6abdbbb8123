# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt that crashes in a step of torchrun's first start; a program for torchrun."""

from __future__ import annotations

import os
import sys

from megatron.training import pretrain_gpt, train_steps


def crash_once(step: int) -> None:
    """Exit rank 1 silently in a step, unless the launcher has restarted it."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" or os.environ["RANK"] != "1":
        return
    take_step = train_steps.SessionSteps.take_step
    count = [0]

    def crashing(self, *args, **kwargs):
        count[0] += 1
        if count[0] == step:
            os._exit(9)
        return take_step(self, *args, **kwargs)

    train_steps.SessionSteps.take_step = crashing


if __name__ == "__main__":
    crash_once(3)
    code = pretrain_gpt.main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
