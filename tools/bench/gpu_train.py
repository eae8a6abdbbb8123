# SPDX-License-Identifier: Apache-2.0
"""Training speed on one GPU: our GPT against transformers, in turns, in one run.

python -m tools.bench.gpu_train                       the 1.3 B Llama shape, sequence 4,096
python -m tools.bench.gpu_train --sizes 2             a microbatch of 2, else by the device's memory
python -m tools.bench.gpu_train --sizes 2 4 8 16      each variant tries these microbatches
python -m tools.bench.gpu_train --all                 bf16 weights and torch.compile as peers too
python -m tools.bench.gpu_train --rehearse            a few steps of a tiny shape, anywhere

This package also trains on one row of 32,768 tokens, without transformers; on a device with too
little memory it recomputes norms and MLP activations in backward.
Weights are bf16 with fp32 masters. TFLOP/s count the model's operations
(`megatron.training.monitoring.flops`), without recomputation. Needs torch, triton, numpy,
safetensors and transformers, and no network.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys

import torch

from megatron.core.transformer.recompute import Recompute
from tools.bench import mcore_step, peers
from tools.bench.cases import MCORE
from tools.bench.gpu_workers import add_options, add_rows, device_bytes, race, work
from tools.bench.harness import Bench, no_device, options_of
from tools.bench.shapes import Shape
from tools.bench.table import LONG_TRAINING_MFU, TRAINING_MFU
from tools.bench.turns import Step, Variant, take_turns

PEER = "transformers autocast"
FURTHER = ("transformers bf16", "transformers compiled")
#: Ours on one long row.
LONG = "ours, one row"
LONG_TOKENS, TINY_LONG_TOKENS = 32768, 256
#: What one row of 32,768 tokens takes without recompute, at 1.3 B weights.
LONG_BYTES = 90e9

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
    if variant == LONG:
        total = math.inf if device.type == "cpu" else device_bytes()
        return mcore_step.training_step(
            shape, bf16=True, device=device, recompute=recompute_for(total)
        )
    if variant == MCORE:
        return mcore_step.training_step(shape, bf16=True, device=device)
    return peers.transformers_step(shape, variant.removeprefix("transformers "), device=device)


def recompute_for(memory_bytes: float) -> Recompute:
    """Return the recompute setting for one row of 32,768 tokens on a device of this memory."""
    return Recompute(granularity=None if memory_bytes > LONG_BYTES else "selective")


def flops_per_token(shape: Shape) -> float:
    """Return the operations of forward and backward for one token, by the training log's rule."""
    from megatron.training.monitoring.flops import training_flops

    whole = training_flops(
        mcore_step.config_of(shape),
        vocab_size=shape.vocabulary,
        seq_length=shape.sequence,
        samples=1,
    )
    return whole / shape.sequence


def loss_problem(variant: Variant, shape: Shape) -> str | None:
    """Return a problem of the loss of a variant's first timed step, or None."""
    expected, loss = math.log(shape.vocabulary), variant.values[0]
    if 0.2 * expected < loss < 1.1 * expected:
        return None
    return f"loss {loss}, expected below {expected:.2f}"


def llama(bench: Bench, options: argparse.Namespace, shape: Shape) -> None:
    """Race the shape.

    Raises:
        ValueError: a variant could not run, or a loss shows that it did other work.
    """
    variants = (MCORE, PEER, *(FURTHER if options.all else ()))
    races = race(bench, options, "tools.bench.gpu_train", variants, weights=shape.parameters)
    for pair in races:
        for name, variant in list(pair.items()):
            problem = loss_problem(variant, shape)
            if problem is None:
                continue
            if name == MCORE:
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
        least_share=TRAINING_MFU,
    )


def long_row(bench: Bench, shape: Shape) -> None:
    """Time our step on one long row, alone on the device.

    Raises:
        ValueError: it could not run.
    """
    shape = dataclasses.replace(shape, batch=1, sequence=bench.sized(LONG_TOKENS, TINY_LONG_TOKENS))
    command = ["-m", "tools.bench.gpu_train", "--worker", LONG, "--sizes", "1"]
    command += ["--rehearse"] if bench.rehearse else []
    rounds = bench.sized(3, 1)
    measured = take_turns({LONG: command}, rounds=rounds, steps=1, warmup=1, untimed=1)
    if LONG not in measured:
        raise ValueError(f"{LONG} of {shape.sequence:,} tokens did not run; its error is above")
    problem = loss_problem(measured[LONG], shape)
    if problem is not None:
        raise ValueError(f"{LONG} has {problem}")
    add_rows(
        bench,
        f"Llama of {shape.parameters:,} weights, one row of {shape.sequence:,} tokens",
        [measured],
        sequence=shape.sequence,
        flops_per_token=flops_per_token(shape),
        targets=[],
        least_share=LONG_TRAINING_MFU,
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
    if options.worker == LONG:
        tokens = TINY_LONG_TOKENS if options.rehearse else LONG_TOKENS
        shape, options.sizes = dataclasses.replace(shape, sequence=tokens), [1]
    if options.worker:
        work(
            options,
            lambda name, size, device: build(name, dataclasses.replace(shape, batch=size), device),
            sequence=shape.sequence,
        )
        return 0
    cases = [
        ("Llama", lambda bench: llama(bench, options, shape)),
        ("Llama, one long row", lambda bench: long_row(bench, shape)),
    ]
    return Bench("training", options).run([] if options.quick else cases)


if __name__ == "__main__":
    sys.exit(main())
