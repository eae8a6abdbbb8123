# SPDX-License-Identifier: Apache-2.0
"""Training speed on one GPU: our GPT against transformers, in turns, in one run.

python -m tools.bench.gpu_train                       the 1.3 B Llama shape, sequence 4,096
python -m tools.bench.gpu_train --sizes 2             a microbatch of 2, else by the device's memory
python -m tools.bench.gpu_train --sizes 2 4 8 16      each variant tries these microbatches
python -m tools.bench.gpu_train --all                 bf16 weights and torch.compile as peers too
python -m tools.bench.gpu_train --rehearse            a few steps of a tiny shape, anywhere

Weights are bf16 with fp32 masters. TFLOP/s count the model's operations
(`megatron.training.monitoring.flops`), not those of the machine. Needs torch, triton, numpy,
safetensors and transformers, and no network.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys

import torch

from tools.bench import ours, peers
from tools.bench.gpu_bench import Bench, no_device, options_of
from tools.bench.gpu_workers import add_options, add_rows, race, work
from tools.bench.shapes import Shape
from tools.bench.turns import Step

OURS = "ours"
PEER = "transformers autocast"
FURTHER = ("transformers bf16", "transformers compiled")

#: 1.34 B weights.
LLAMA_1_3B = Shape(
    layers=24,
    hidden=2048,
    ffn=5504,
    heads=16,
    kv_heads=16,
    vocabulary=32000,
    batch=1,
    sequence=4096,
)
TINY = Shape(
    layers=2, hidden=64, ffn=192, heads=4, kv_heads=2, vocabulary=512, batch=1, sequence=128
)


def build(variant: str, shape: Shape, device: torch.device) -> Step:
    """Build one training step of a variant: forward, backward, clip, AdamW, loss to the host."""
    if variant == OURS:
        return ours.training_step(shape, bf16=True, device=device)
    return peers.transformers_step(shape, variant.removeprefix("transformers "), device=device)


def flops_per_token(shape: Shape) -> float:
    """Return the operations of forward and backward for one token, by the training log's rule."""
    from megatron.training.monitoring.flops import training_flops

    whole = training_flops(
        ours.config_of(shape), vocab_size=shape.vocabulary, seq_length=shape.sequence, samples=1
    )
    return whole / shape.sequence


def llama(bench: Bench, options: argparse.Namespace, shape: Shape) -> None:
    """Race the shape.

    Raises:
        ValueError: a variant could not run, or a loss shows that it did other work.
    """
    variants = (OURS, PEER, *(FURTHER if options.all else ()))
    races = race(bench, options, "tools.bench.gpu_train", variants, weights=shape.parameters)
    expected = math.log(shape.vocabulary)
    for pair in races:
        for name, variant in list(pair.items()):
            if 0.2 * expected < variant.values[0] < 1.1 * expected:
                continue
            problem = f"loss {variant.values[0]}, expected below {expected:.2f}"
            if name == OURS:
                raise ValueError(f"{name} has {problem}")
            bench.problems[name] = problem
            del pair[name]
    what = f"Llama of {shape.parameters:,} weights, sequence {shape.sequence:,}"
    add_rows(
        bench,
        what,
        races,
        sequence=shape.sequence,
        flops_per_token=flops_per_token(shape),
        targets=[f"{PEER} >= 1.0"],
        least_share=0.45,
    )


def main() -> int:
    """Measure from the command line, or be one of the workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--all", action="store_true", help="more peers than transformers' autocast")
    options = options_of(parser)
    if no_device(options, "gpu_train"):
        return 0
    shape = TINY if options.rehearse else LLAMA_1_3B
    if options.rehearse:
        options.sizes = [1, 2]
    if options.worker:
        work(
            options,
            lambda name, size, device: build(name, dataclasses.replace(shape, batch=size), device),
            sequence=shape.sequence,
        )
        return 0
    cases = [] if options.quick else [("Llama", lambda bench: llama(bench, options, shape))]
    return Bench("training", options).run(cases)


if __name__ == "__main__":
    sys.exit(main())
