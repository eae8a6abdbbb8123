# SPDX-License-Identifier: Apache-2.0
"""Kill a training run at random moments and see that nothing is lost and nothing differs.

python -m tools.soak                        200 kills, a seed of the day's own
python -m tools.soak --seed 7 --chain 3     one chain of kills again

A chain is one run: it is killed, started again with the same line, and so on to its end. After
every kill all checkpoints have to be there and whole, with the bits that they have in a run that
nothing happened to. Which process is killed, how and when is drawn from the seed; half of the
kills are timed within the measured duration of a save.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import shutil
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

from tools.soak.choices import FLAVOURS

WARM = "tools.soak.warm"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kills", type=int, default=200, help="how many (200)")
    add("--seed", type=int, help="of all choices; else a new one, which is printed")
    add("--ranks", type=int, default=2, help="processes of a run (2)")
    add("--iterations", type=int, default=24, help="length of a run (24)")
    add("--disk-milliseconds", type=float, default=20.0, help="what file operations cost more (20)")
    add("--chain", type=int, help="only this one")
    add("--flavour", action="append", choices=[f.name for f in FLAVOURS], help="only these runs")
    add("--seconds-limit", type=float, help="after which it counts as failed")
    add("--plant", metavar="MODULE:FUNCTION", help="called in every rank: a defect to be found")
    add("--folder", type=Path, help="for all files; else a temporary one")
    options = parser.parse_args(argv)
    if options.ranks < 2 or options.ranks % 2:
        parser.error("--ranks must be even: some runs are tensor parallel")
    return options


def main(argv: list[str]) -> int:
    """Soak, and return the exit code."""
    options = parse(argv)
    if options.seed is None:
        options.seed = secrets.randbelow(10**6)
    options.folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder)).resolve()
    print(
        f"soak: seed {options.seed}, {options.kills} kills, files in {options.folder}", flush=True
    )
    # It imports torch, as does this process meanwhile.
    multiprocessing.get_context("forkserver").set_forkserver_preload([WARM])
    forkserver.ensure_running()
    from tools.soak.run import soak

    if not soak(options):
        return 1
    shutil.rmtree(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
