# SPDX-License-Identifier: Apache-2.0
"""A training step of a hybrid with our kernels, against the same step with the reference ops.

python -m tools.bench.gpu_hybrid                 1.35 B weights, 3 gated delta nets to 1 attention
python -m tools.bench.gpu_hybrid --rehearse      a tiny one, on a CPU, in Triton's interpreter

Both variants are our model and train the same weights. They differ in the ops of recurrent layers
alone: attention, norms, gates of MLPs and the loss are the same kernels in both.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from types import ModuleType

import torch

from megatron.core.models.gpt import GPTConfig
from megatron.core.ops import backend_choice
from megatron.core.ssm import GatedDeltaNetConfig
from tools.bench import mcore_step
from tools.bench.gpu_workers import add_options, add_rows, race, work
from tools.bench.harness import Bench, no_device, options_of
from tools.bench.shapes import Shape
from tools.bench.turns import Step

KERNELS, REFERENCE = "triton", "reference"
#: What a gated delta net calls; as its ops name themselves when they choose.
RECURRENT_OPS = frozenset(("gated_delta_rule", "recurrence_prologue", "gated_rms_norm"))
#: The op without which there was no race.
SUBJECT = "gated_delta_rule"
LOSS_ERROR = 0.02  # relative; both round to bf16, in other places
PATTERN, TINY_PATTERN = "G-G-G-*-", "G-*-"

HYBRID_1_3B = Shape(
    layers=24,
    hidden=2048,
    ffn=5504,
    heads=16,
    kv_heads=16,
    vocabulary=32000,
    batch=1,
    sequence=4096,
)
TINY = Shape(layers=2, hidden=16, ffn=12, heads=2, kv_heads=1, vocabulary=32, batch=1, sequence=9)
DELTA = GatedDeltaNetConfig(
    num_key_heads=8, num_value_heads=16, key_channels=128, value_channels=128
)
TINY_DELTA = GatedDeltaNetConfig(
    num_key_heads=1, num_value_heads=2, key_channels=8, value_channels=8
)


def config_of(shape: Shape, delta: GatedDeltaNetConfig, period: str) -> GPTConfig:
    """Return the model: the blocks of a shape's layers, most of its attentions delta nets."""
    pattern = period * (shape.layers // period.count("-"))
    return dataclasses.replace(
        mcore_step.config_of(shape),
        num_layers=len(pattern),
        ffn_pattern="",
        pattern=pattern,
        delta_net=delta,
    )


class Picked:
    """What the ops of recurrent layers choose, where nobody asks for one: always the same.

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


def hybrid(bench: Bench, options: argparse.Namespace) -> None:
    """Race the step.

    Raises:
        ValueError: a variant did not run, or not with its ops, or the losses differ.
    """
    shape, config = chosen(options)
    races = race(
        bench,
        options,
        "tools.bench.gpu_hybrid",
        (KERNELS, REFERENCE),
        weights=shape.parameters,
    )
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


def flops_per_token(shape: Shape, config: GPTConfig) -> float:
    """Return the operations of forward and backward for one token, by the training log's rule."""
    from megatron.training.monitoring.flops import training_flops

    whole = training_flops(
        config, vocab_size=shape.vocabulary, seq_length=shape.sequence, samples=1
    )
    return whole / shape.sequence


def chosen(options: argparse.Namespace) -> tuple[Shape, GPTConfig]:
    """Return shape and model that the options ask for."""
    if options.rehearse:
        return TINY, config_of(TINY, TINY_DELTA, TINY_PATTERN)
    return HYBRID_1_3B, config_of(HYBRID_1_3B, DELTA, PATTERN)


def main() -> int:
    """Measure from the command line, or be one of the workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = options_of(parser)
    if no_device(options, "gpu_hybrid"):
        return 0
    shape, config = chosen(options)
    if options.rehearse:
        options.sizes = [1]
    if options.worker:
        picked = Picked(options.worker)

        def build(name: str, size: int, device: torch.device) -> Step:
            sized_shape = dataclasses.replace(shape, batch=size)
            # The interpreter has no bf16.
            step, _, _ = mcore_step.training_parts(
                sized_shape, bf16=not options.rehearse, device=device, config=config
            )
            picked.install()
            return step

        work(
            options, build, sequence=shape.sequence, facts=lambda: {"picked": dict(picked.choices)}
        )
        return 0
    cases = [] if options.quick else [("hybrid", lambda bench: hybrid(bench, options))]
    return Bench("hybrid", options).run(cases)


if __name__ == "__main__":
    sys.exit(main())
