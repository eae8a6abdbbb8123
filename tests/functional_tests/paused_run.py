# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt as a program that waits in its sixth step, until it is killed; for torchrun."""

from __future__ import annotations

import os
import sys
import time

from megatron.training import pretrain_gpt, session


def hold(step: int) -> None:
    """Never carry out this step of this process."""
    whole = session.SessionSteps.take_step
    count = [0]

    def holding(self, *arguments, **named):
        count[0] += 1
        if count[0] == step:
            time.sleep(600)
        return whole(self, *arguments, **named)

    session.SessionSteps.take_step = holding


if __name__ == "__main__":
    hold(6)
    os._exit(pretrain_gpt.main(sys.argv[1:], os.environ))
