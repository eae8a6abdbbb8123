# SPDX-License-Identifier: Apache-2.0
"""Training speed and peak memory of our GPT against transformers and megatron-core.

python -m tools.bench.train                     shapes S and M against transformers
python -m tools.bench.train --peers             megatron-core too (installs it on first use)
python -m tools.bench.train --shapes S --only "ours fp32" "transformers fp32"
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Literal

from tools.bench.shapes import SHAPES
from tools.bench.table import Row, compared, format_table
from tools.bench.turns import Step, Variant, ratio, serve, take_turns

MCORE = ("ours fp32", "ours bf16")
TRANSFORMERS = ("transformers fp32", "transformers autocast", "transformers compiled")
MEGATRON_CORE = "megatron-core fp32"

#: Which of our variants races which peer, and what the speed and the memory ratio must be.
RACES = (
    ("ours fp32", "transformers fp32", ">= 1.05", "<= 1.0"),
    ("ours fp32", MEGATRON_CORE, ">= 1.25", "<= 1.0"),
    ("ours bf16", "transformers autocast", ">= 1.15", "<= 1.0"),
    ("ours bf16", "transformers compiled", ">= 1.0", "<= 1.0"),
)


def build(variant: str, shape_name: str, threads: int) -> Step:
    """Build the training step of one variant; called in a separate process."""
    import torch

    torch.set_num_threads(threads)
    shape = SHAPES[shape_name]
    if variant in MCORE:
        from tools.bench import mcore_step  # never beside megatron-core: both are megatron.core

        return mcore_step.training_step(shape, bf16=variant.endswith("bf16"))
    from tools.bench import peers

    if variant == MEGATRON_CORE:
        return peers.megatron_core_step(shape)
    return peers.transformers_step(shape, variant.removeprefix("transformers "))


def measure(
    shape_name: str,
    variants: Sequence[str],
    *,
    threads: int,
    rounds: int,
    steps: int,
    clock: Literal["wall", "cpu"] = "wall",
) -> dict[str, Variant]:
    """Let the variants train in turns at one shape; return what each measured.

    Raises:
        ValueError: a variant's loss is not near the others': it did other work.
    """
    commands = {
        name: ["-m", "tools.bench.train", "--worker", name, "--shapes", shape_name]
        + ["--threads", str(threads)]
        for name in variants
    }
    measured = take_turns(commands, rounds=rounds, steps=steps, warmup=2, clock=clock)
    expected = math.log(SHAPES[shape_name].vocabulary)
    for name, variant in measured.items():
        if not 0.5 * expected < variant.values[0] < 1.1 * expected:
            raise ValueError(f"{name} has loss {variant.values[0]}, expected below {expected:.2f}")
    return measured


def rows_of(shape_name: str, variants: dict[str, Variant]) -> list[Row]:
    """Turn one shape's measurements into rows: tokens per second, then peak memory."""
    tokens = SHAPES[shape_name].tokens
    rows: list[Row] = []
    for mcore, peer, speed_target, memory_target in RACES:
        if mcore not in variants or peer not in variants:
            continue
        mcore_variant, peer_variant = variants[mcore], variants[peer]
        speed = compared(
            bench="train",
            what=f"{shape_name} tokens/s: {mcore} / {peer}",
            mcore=tokens / mcore_variant.seconds(),
            peer=tokens / peer_variant.seconds(),
            ratio=ratio(mcore_variant, peer_variant),
            target=speed_target if shape_name == "M" else "",
        )
        memory = compared(
            bench="train",
            what=f"{shape_name} peak MB: {mcore} / {peer}",
            mcore=mcore_variant.peak_memory_bytes / 1e6,
            peer=peer_variant.peak_memory_bytes / 1e6,
            ratio=mcore_variant.peak_memory_bytes / peer_variant.peak_memory_bytes,
            target=memory_target if shape_name == "M" else "",
        )
        rows += [speed, memory]
    return rows


def rows(quick: bool, peers: bool = False) -> list[Row]:
    """Measure. `quick` is shape S without compilation; `peers` adds megatron-core."""
    variants = [*MCORE, *TRANSFORMERS[: 2 if quick else 3]]
    if peers:
        variants.append(_ready_megatron_core())
    table_rows: list[Row] = []
    for name in ("S",) if quick else ("S", "M"):
        measured = measure(
            name,
            variants,
            threads=_cores(),
            rounds=3 if quick else 7,
            steps=4 if name == "S" and not quick else 2,
        )
        table_rows += rows_of(name, measured)
    return table_rows


def _ready_megatron_core() -> str:
    """Install megatron-core if needed; return the variant's name."""
    from tools.bench.peers import install_megatron_core

    install_megatron_core()
    return MEGATRON_CORE


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def main() -> None:
    """Measure from the command line, or be one of the workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--shapes", nargs="+", default=["S", "M"], choices=list(SHAPES))
    parser.add_argument("--only", nargs="+", choices=[*MCORE, *TRANSFORMERS, MEGATRON_CORE])
    parser.add_argument("--peers", action="store_true", help="megatron-core too; installs it")
    parser.add_argument("--threads", type=int, default=_cores())
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: with --threads 1"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    arguments = parser.parse_args()
    if arguments.worker:
        serve(lambda: build(arguments.worker, arguments.shapes[0], arguments.threads))
        return
    variants = arguments.only or [*MCORE, *TRANSFORMERS]
    if arguments.peers or MEGATRON_CORE in variants:
        variants = [v for v in variants if v != MEGATRON_CORE] + [_ready_megatron_core()]
    for name in arguments.shapes:
        measured = measure(
            name,
            variants,
            threads=arguments.threads,
            rounds=arguments.rounds,
            steps=arguments.steps,
            clock=arguments.clock,
        )
        for variant in measured.values():
            print(
                f"{name} {variant.name}: {SHAPES[name].tokens / variant.seconds():,.0f} tokens/s, "
                f"peak {variant.peak_memory_bytes / 1e6:,.0f} MB, loss {variant.values[-1]:.4f}",
                file=sys.stderr,
            )
        print(format_table(rows_of(name, measured)))


if __name__ == "__main__":
    main()
