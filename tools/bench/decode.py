# SPDX-License-Identifier: Apache-2.0
"""One decode step of the engine: against transformers' `generate`, the local forward, itself
without graphs, and that with a no-op autograd Function.

python -m tools.bench.decode                            both models, rows of the table
python -m tools.bench.decode --clock cpu --threads 1    on a machine that others use too
python -m tools.bench.decode --profile                  where the host's time of a small step goes

A side is one request that generates greedily. Sides have the same weights and take turns in one
process, after a round that is not counted. A row gives the median of the rounds' ratios, and their
quartiles.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
from collections.abc import Callable

import torch

from megatron.core.device import peak_memory_bytes
from megatron.core.inference.engine import generate
from megatron.core.inference.model_runner import LanguageModel
from megatron.inference.bench import Load, make_requests
from tools.bench.inference import (
    CLOCKS,
    TINY,
    engine_of,
    in_turns,
    llama,
    static_batch,
    with_weights_of,
)
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared, format_table

#: Rounds and new tokens of a request; a few for a quick look.
ROUNDS, TOKENS = 9, 64
QUICK_ROUNDS, QUICK_TOKENS = 2, 16


class NoOp(torch.autograd.Function):
    """A reduction over one rank, for models that do not skip it."""

    @staticmethod
    def forward(ctx, x):
        """Return x."""
        return x.view_as(x)


class WithNoOp:
    """A forward pass that enters one no-op autograd Function a step."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.head = model, model.head

    def __call__(self, tokens: torch.Tensor, **context: object) -> torch.Tensor:
        """Return the hidden states."""
        return NoOp.apply(self.model(tokens, **context))

    def weights_replaced(self) -> None:
        """See `LanguageModel`."""
        self.model.weights_replaced()


def rows_of(shape: Shape, quick: bool, clock: Callable[[], float], targets: dict) -> list[Row]:
    """Return the rows of one model: seconds a step of the optimized forward, by three others'."""
    rounds, new = (QUICK_ROUNDS, QUICK_TOKENS) if quick else (ROUNDS, TOKENS)
    peer = llama(shape)
    model = with_weights_of(peer)
    load = Load(num_requests=1, input_tokens=1, min_output_tokens=new, max_output_tokens=new)
    requests = make_requests(load, shape.vocabulary)
    engines = {
        "optimized": engine_of(model, optimized=True),
        "itself eager": engine_of(model, optimized=True, eager=True),
        "itself eager, with a no-op Function": engine_of(model, optimized=True, eager=True),
        "local": engine_of(model),
    }
    noop = engines["itself eager, with a no-op Function"]
    noop.runner.model = WithNoOp(noop.runner.model)
    texts: dict[str, list[int]] = {}

    def stepper(name: str) -> Callable[[], float]:
        def run() -> float:
            engines[name].scheduler.reset_prefix_cache()
            start = clock()
            texts[name] = generate(engines[name], requests)[0][0].tokens
            return (clock() - start) / new

        return run

    def static() -> float:
        start = clock()
        texts["generate"] = static_batch(peer, requests)[0]
        return (clock() - start) / new

    sides, table_rows = {name: stepper(name) for name in engines} | {"generate": static}, []
    for name in list(sides)[1:]:
        mcore_name = "itself eager" if name.endswith("Function") else "optimized"
        mcore, peers = in_turns((sides[mcore_name], sides[name]), rounds=rounds)
        if texts[name] != texts[mcore_name]:
            raise ValueError(f"{name} generates another text: the race is void")
        ratios = [a / b for a, b in zip(mcore, peers, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds, peak_bytes = statistics.median(mcore), peak_memory_bytes(torch.device("cpu"))
        table_rows.append(
            compared(
                bench="decode",
                what=(
                    f"{shape.layers} layers of {shape.hidden}, {mcore_name}, 1 request, "
                    f"{new} steps, {1 / seconds:,.0f} tokens/s, {peak_bytes / 1e6:,.0f} MB: "
                    f"s a step / {name} (quartiles {low:.3f} to {high:.3f})"
                ),
                mcore=seconds,
                peer=statistics.median(peers),
                ratio=middle,
                target=targets.get(name, ""),
            )
        )
    return table_rows


def rows(quick: bool, *, clock: str = "wall") -> list[Row]:
    """Measure the small model, whose step is the host's work, and the one of 33.6 M parameters."""
    tiny_rows = rows_of(TINY, quick, CLOCKS[clock], {"generate": "<= 0.4"})
    return [*tiny_rows, *rows_of(SHAPES["M"], quick, CLOCKS[clock], {"generate": "<= 0.87"})]


def profile(lines: int = 30) -> None:
    """Print the time of each function in a small model's steps."""
    model = with_weights_of(llama(TINY))
    load = Load(num_requests=1, input_tokens=1, min_output_tokens=TOKENS, max_output_tokens=TOKENS)
    requests = make_requests(load, TINY.vocabulary)
    engine = engine_of(model, optimized=True)
    generate(engine, requests)
    with cProfile.Profile() as profiler:
        generate(engine, requests)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and tokens")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--profile", action="store_true", help="profile a small step instead")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.profile:
        profile()
    else:
        print(format_table(rows(arguments.quick, clock=arguments.clock)))


if __name__ == "__main__":
    main()
