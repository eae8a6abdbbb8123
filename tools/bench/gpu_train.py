# SPDX-License-Identifier: Apache-2.0
"""Training steps on one GPU, in turns with a peer in one run: a Llama of 1.34 B weights against
transformers, and a hybrid of 1.35 B weights with our kernels against itself with reference ops.

python -m tools.bench.gpu_train                     Llama, sequence 4,096, and one long row
python -m tools.bench.gpu_train --model hybrid      3 gated delta nets to 1 attention
python -m tools.bench.gpu_train --size 2            a microbatch of 2, else by the device's memory
python -m tools.bench.gpu_train --all               bf16 weights and torch.compile as peers too
python -m tools.bench.gpu_train --rehearse          a few steps of a tiny shape, anywhere

The long row has 32,768 tokens and no peer; on a device with too little memory its step recomputes
norms and MLP activations in backward. Weights are bf16 with fp32 masters. TFLOP/s count the model's
operations (`megatron.training.monitoring.flops`), without recomputation. Both variants of the
hybrid are our model and train the same weights; they differ in the ops of recurrent layers alone.
Needs torch, triton, numpy, safetensors and transformers, and no network.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections import Counter
from types import ModuleType

import torch

from megatron.core.models.gpt import GPTConfig
from megatron.core.ops import backend_choice
from megatron.core.ssm import GatedDeltaNetConfig
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
#: The variants of the hybrid, named as the implementations of its recurrent ops.
KERNELS, REFERENCE = "triton", "reference"
#: What a gated delta net calls, as its ops name themselves when they choose an implementation.
RECURRENT_OPS = frozenset(("gated_delta_rule", "recurrence_prologue", "gated_rms_norm"))
#: The op without which there was no race.
SUBJECT = "gated_delta_rule"
LOSS_ERROR = 0.02  # relative; both variants of the hybrid round to bf16, in other places

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
#: Without a kernel for the interpreter, the reference op of a delta net is slow.
TINY_HYBRID = Shape(
    layers=2, hidden=16, ffn=12, heads=2, kv_heads=1, vocabulary=32, batch=1, sequence=9
)
PATTERN, TINY_PATTERN = "G-G-G-*-", "G-*-"
DELTA = GatedDeltaNetConfig(
    num_key_heads=8, num_value_heads=16, key_channels=128, value_channels=128
)
TINY_DELTA = GatedDeltaNetConfig(
    num_key_heads=1, num_value_heads=2, key_channels=8, value_channels=8
)


def hybrid_config(
    shape: Shape = LLAMA_1_3B, delta: GatedDeltaNetConfig = DELTA, period: str = PATTERN
) -> GPTConfig:
    """Return the model: the blocks of a shape's layers, most of its attentions delta nets."""
    pattern = period * (shape.layers // period.count("-"))
    return dataclasses.replace(
        mcore_step.config_of(shape),
        num_layers=len(pattern),
        ffn_pattern="",
        pattern=pattern,
        delta_net=delta,
    )


def model_of(name: str, *, rehearse: bool) -> tuple[Shape, GPTConfig]:
    """Return the shape and the model of "llama" or "hybrid"."""
    if name == "hybrid":
        if rehearse:
            return TINY_HYBRID, hybrid_config(TINY_HYBRID, TINY_DELTA, TINY_PATTERN)
        return LLAMA_1_3B, hybrid_config()
    shape = TINY if rehearse else LLAMA_1_3B
    return shape, mcore_step.config_of(shape)


class Picked:
    """The ops of recurrent layers choose one implementation, unless a caller asks for another.

    Args:
        implementation: "triton" or "reference".
    """

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.choices: Counter[str] = Counter()
        self._choose = backend_choice.choose

    def __call__(
        self, implementation: str | None, tensor: torch.Tensor, op: str, **options: bool
    ) -> str:
        """Choose as `backend_choice.choose` does."""
        if op in RECURRENT_OPS and implementation is None:
            implementation = self.implementation
        choice = self._choose(implementation, tensor, op, **options)
        self.choices[f"{op} {choice}"] += 1
        return choice

    def install(self) -> None:
        """Let every op of this process choose by this."""
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or not module.__name__.startswith("megatron."):
                continue
            if vars(module).get("choose") is self._choose:
                module.choose = self  # type: ignore[attr-defined]


def recompute_for(memory_bytes: float) -> Recompute:
    """Return the recompute setting for one row of 32,768 tokens on a device of this memory."""
    return Recompute(granularity=None if memory_bytes > LONG_BYTES else "selective")


def run_worker(options: argparse.Namespace) -> None:
    """Train a variant: forward, backward, clip, AdamW, loss to the host."""
    shape, config = model_of(options.model, rehearse=options.rehearse)
    picked = Picked(options.worker)

    def build(variant: str, size: int, device: torch.device) -> Step:
        sized = dataclasses.replace(shape, batch=size)
        if options.model == "hybrid":
            # The interpreter has no bf16.
            bf16 = not options.rehearse
            step, _, _ = mcore_step.training_parts(sized, bf16=bf16, device=device, config=config)
            picked.install()
            return step
        if variant == LONG:
            tokens = TINY_LONG_TOKENS if options.rehearse else LONG_TOKENS
            sized = dataclasses.replace(sized, sequence=tokens)
            recompute = recompute_for(math.inf if device.type == "cpu" else device_bytes())
            return mcore_step.training_step(sized, bf16=True, device=device, recompute=recompute)
        if variant == MCORE:
            return mcore_step.training_step(sized, bf16=True, device=device)
        return peers.transformers_step(sized, variant.removeprefix("transformers "), device=device)

    work(options, build, facts=lambda: {"picked": dict(picked.choices)})


def flops_per_token(shape: Shape, config: GPTConfig) -> float:
    """Return the operations of forward and backward for one token, by the training log's rule."""
    from megatron.training.monitoring.flops import training_flops

    whole = training_flops(
        config, vocab_size=shape.vocabulary, seq_length=shape.sequence, samples=1
    )
    return whole / shape.sequence


def loss_problem(variant: Variant, shape: Shape) -> str | None:
    """Return a problem of the loss of a variant's first timed step, or None."""
    expected, loss = math.log(shape.vocabulary), variant.values[0]
    if 0.2 * expected < loss < 1.1 * expected:
        return None
    return f"loss {loss}, expected below {expected:.2f}"


def llama(bench: Bench, options: argparse.Namespace, shape: Shape, config: GPTConfig) -> None:
    """Race the Llama with transformers.

    Raises:
        ValueError: a variant could not run, or a loss shows that it did other work.
    """
    variants = (MCORE, PEER, *(FURTHER if options.all else ()))
    races = race(bench, options, variants, weights=shape.parameters)
    for pair in races:
        for name, variant in list(pair.items()):
            problem = loss_problem(variant, shape)
            if problem is None:
                continue
            if name == MCORE:
                raise ValueError(f"{name} has {problem}")
            bench.problems[name] = problem
            del pair[name]
    add_rows(
        bench,
        f"Llama of {shape.parameters:,} weights, sequence {shape.sequence:,}",
        races,
        sequence=shape.sequence,
        flops_per_token=flops_per_token(shape, config),
        targets=[f"{PEER} >= 1.0"],
        least_share=TRAINING_MFU,
    )


def long_row(bench: Bench, shape: Shape, config: GPTConfig) -> None:
    """Time our step on one long row, alone on the device.

    Raises:
        ValueError: it could not run.
    """
    shape = dataclasses.replace(shape, batch=1, sequence=bench.sized(LONG_TOKENS, TINY_LONG_TOKENS))
    command = ["-m", "tools.bench.gpu_train", "--worker", LONG, "--size", "1"]
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
        flops_per_token=flops_per_token(shape, config),
        targets=[],
        least_share=LONG_TRAINING_MFU,
    )


def hybrid(bench: Bench, options: argparse.Namespace, shape: Shape, config: GPTConfig) -> None:
    """Race the hybrid with itself.

    Raises:
        ValueError: a variant did not run, or not with its ops, or the losses differ.
    """
    races = race(bench, options, (KERNELS, REFERENCE), weights=shape.parameters)
    (pair,) = races
    for name, variant in pair.items():
        other_name = REFERENCE if name == KERNELS else KERNELS
        picked = variant.facts["picked"]
        if not picked.get(f"{SUBJECT} {name}") or picked.get(f"{SUBJECT} {other_name}"):
            raise ValueError(f"the step of {name} picked {picked}: the race is void")
    losses = [variant.values[0] for variant in pair.values()]
    same_batch = len({variant.facts["micro_batch_size"] for variant in pair.values()}) == 1
    if same_batch and abs(losses[0] - losses[-1]) > LOSS_ERROR * losses[-1]:
        raise ValueError(f"losses of {losses[0]} and {losses[-1]}: the race is void")
    add_rows(
        bench,
        f"hybrid {PATTERN} of {shape.layers} layers, sequence {shape.sequence:,}",
        races,
        sequence=shape.sequence,
        flops_per_token=flops_per_token(shape, config),
        targets=[f"{REFERENCE} >= 1.2"],
    )


def main() -> int:
    """Measure from the command line, or be one of the workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--model", choices=("llama", "hybrid"), default="llama")
    parser.add_argument("--all", action="store_true", help="more peers than transformers' autocast")
    options = options_of(parser)
    if no_device(options, "gpu_train"):
        return 0
    if options.worker:
        run_worker(options)
        return 0
    model = model_of(options.model, rehearse=options.rehearse)
    cases = [
        ("Llama", lambda bench: llama(bench, options, *model)),
        ("Llama, one long row", lambda bench: long_row(bench, *model)),
    ]
    name = "training"
    if options.model == "hybrid":
        name, cases = "hybrid", [("hybrid", lambda bench: hybrid(bench, options, *model))]
    return Bench(name, options).run([] if options.quick else cases)


if __name__ == "__main__":
    sys.exit(main())
