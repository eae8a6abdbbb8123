# SPDX-License-Identifier: Apache-2.0
"""Training speed and peak memory of our GPT against transformers.

python -m tools.bench.train                     shapes S and M
python -m tools.bench.train --shapes S --only "ours fp32" "transformers fp32"
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Literal

import torch

from tools.bench.harness import run_rows
from tools.bench.peers import transformers_step
from tools.bench.shapes import SHAPES
from tools.bench.table import Row, compared
from tools.bench.turns import Step, Variant, ratio, serve, take_turns

MCORE = ("ours fp32", "ours bf16")
TRANSFORMERS = ("transformers fp32", "transformers autocast", "transformers compiled")
#: The first argument of a worker.
WORKER = "--worker"

#: Which of our variants races which peer, and what the speed and the memory ratio must be.
RACES = (
    ("ours fp32", "transformers fp32", ">= 1.05", "<= 1.0"),
    ("ours bf16", "transformers autocast", ">= 1.15", "<= 1.0"),
    ("ours bf16", "transformers compiled", ">= 1.0", "<= 1.0"),
)


def build(variant: str, shape_name: str) -> Step:
    """Build the training step of one variant; called in a separate process."""
    shape = SHAPES[shape_name]
    if variant in MCORE:
        from tools.bench import mcore_step  # here: its memory is not of a peer's process

        return mcore_step.training_step(shape, bf16=variant.endswith("bf16"))
    return transformers_step(shape, variant.removeprefix("transformers "))


def measure(
    shape_name: str,
    variants: Sequence[str],
    *,
    rounds: int,
    steps: int,
    clock: Literal["wall", "cpu"],
) -> dict[str, Variant]:
    """Let the variants train in turns at one shape; return what each measured.

    Raises:
        ValueError: a variant's loss is not near the others': it did other work.
    """
    worker = ["-m", "tools.bench.train", WORKER, str(torch.get_num_threads()), shape_name]
    commands = {name: [*worker, name] for name in variants}
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


def rows(
    quick: bool = False,
    *,
    shapes: Sequence[str] = ("S", "M"),
    only: Sequence[str] = (*MCORE, *TRANSFORMERS),
    rounds: int = 0,
    clock: Literal["wall", "cpu"] = "wall",
) -> list[Row]:
    """Let the variants train in turns.

    Args:
        quick: shape S without compilation.
        shapes: names of model shapes.
        only: variants.
        rounds: turns of each variant; 0 is 7, or 3 with `quick`.
        clock: "cpu" needs a single thread.
    """
    variants = [name for name in only if not (quick and name in TRANSFORMERS[2:])]
    table_rows: list[Row] = []
    for name in shapes[: 1 if quick else None]:
        steps = 4 if name == "S" and not quick else 2
        rounds = rounds or (3 if quick else 7)
        measured = measure(name, variants, rounds=rounds, steps=steps, clock=clock)
        for variant in measured.values():
            print(f"{name} {variant.name}: loss {variant.values[-1]:.4f}", file=sys.stderr)
        table_rows += rows_of(name, measured)
    return table_rows


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        threads, shape_name, variant = sys.argv[2:]
        torch.set_num_threads(int(threads))
        serve(lambda: build(variant, shape_name))
    else:
        run_rows(rows, __doc__)
