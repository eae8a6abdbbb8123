# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt that pauses in its sixth step until it is killed; a program for torchrun."""

from __future__ import annotations

import os
import sys
import time

from megatron.training import pretrain_gpt, train_steps


def hold(step: int) -> None:
    """Pause this process when it reaches step number `step`."""
    take_step = train_steps.SessionSteps.take_step
    count = [0]

    def paused(self, *args, **kwargs):
        count[0] += 1
        if count[0] == step:
            time.sleep(600)
        return take_step(self, *args, **kwargs)

    train_steps.SessionSteps.take_step = paused


if __name__ == "__main__":
    hold(6)
    os._exit(pretrain_gpt.main(sys.argv[1:], os.environ))
