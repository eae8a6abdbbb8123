# SPDX-License-Identifier: Apache-2.0
"""How many pieces contexts are cut into, so that few rows still fill a device.

Reading the cache is all that a decode step costs. A program reads one row's keys of one group, and
a batch of b rows with g groups has only b g programs, while a device needs a few for each of its
processors to reach its bandwidth. So contexts are cut, each program reads one piece, and a second
kernel merges the results of the pieces by their log-sum-exps (Dao et al., "Flash-Decoding for
long-context inference", 2023). The result of a piece is 4 d bytes a head in fp32, written once and
read once, while its keys and values take 4 d bytes a token in bf16: with r heads in a group, pieces
of 256 tokens add 8 r d bytes to 4 d 256, which is 6 % at r = 8.
"""

from __future__ import annotations

import functools

SHORTEST_PIECE = 256  # tokens; rows too short for all pieces have fewer
#: Nor does a program read a longer context alone while others have long ended.
LONGEST_PIECE = 16384
MOST_PIECES = 128
#: Fewer pieces are taken where they fill the device so well, compared with the best.
GOOD_ENOUGH = 0.85


@functools.lru_cache(maxsize=4096)
def pieces(programs: int, context: int, resident: int) -> int:
    """Choose into how many pieces contexts are cut.

    Programs run in waves of `resident`; the last wave is not full. More pieces make finer waves
    and more to merge, so the fewest that are nearly as good as the best are taken. Only bounds
    known to the host decide: the choice is the same for every batch of a CUDA graph.

    Args:
        programs: how many there are if nothing is cut.
        context: tokens that the longest row sees.
        resident: programs that the device runs at once.

    Returns:
        How many, at least 1.
    """
    most = min(MOST_PIECES, context // SHORTEST_PIECE)
    if most <= 1 or programs == 0:
        return 1
    least = min(most, -(-context // LONGEST_PIECE))
    if programs * least >= resident:
        return least
    choices = range(least, most + 1)
    wanted = GOOD_ENOUGH * max(_share_of_waves(programs * count, resident) for count in choices)
    return next(c for c in choices if _share_of_waves(programs * c, resident) >= wanted)


def _share_of_waves(programs: int, resident: int) -> float:
    """Return how full the waves of so many programs are, 1 for full ones."""
    waves = -(-programs // resident)
    return programs / (waves * resident)
