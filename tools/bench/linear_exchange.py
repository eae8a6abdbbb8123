# SPDX-License-Identifier: Apache-2.0
"""Exchange tokens for heads in one all-to-all, against one per section and sequence.

python -m tools.bench.linear_exchange          4 gloo ranks, 1, 4 and 16 sequences

Forward and backward of the exchange of one recurrent layer: 4,096 tokens a rank, 1,024 columns in 6
sections, and the value section on the way back. All forms run in the same processes and take turns.
A ratio is the time of another form over ours; `cpu ms` are the CPU seconds of all ranks, which
depend less on other work of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist

from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceSharding
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import gloo_ranks
from tools.bench.exchange_forms import FORMS, Form, McoreForm, PerSequence, Unfolded
from tools.bench.table import Row, compared, format_table

RANKS, TOKENS, HEADS = 4, 4096, 8
#: Columns of a head: query, key, value, gate, beta, alpha.
SECTIONS = (20, 20, 42, 42, 2, 2)
VALUE = 2
SEQUENCES = (1, 4, 16)
#: Least ratio, by form and sequences.
TARGETS = {(PerSequence, 4): ">= 1.5", (PerSequence, 16): ">= 4"}
WARMUP_ROUNDS = 2
DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})


class Layer:
    """The exchanges of one layer, forward and backward, in one form."""

    def __init__(self, form: Form, dtype: torch.dtype) -> None:
        self.form, cp = form, form.group.size
        source = torch.Generator().manual_seed(form.group.rank)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source, dtype=dtype)

        length, width = form.cut.local_length, HEADS * sum(SECTIONS)
        self.x = random(length, 1, width)[..., form.columns()].requires_grad_()
        size = (length * cp, HEADS // cp)
        self.grad_outputs = [random(*size, columns) for columns in SECTIONS]
        self.y = random(*size, SECTIONS[VALUE]).requires_grad_()
        self.pull = random(length, 1, HEADS, SECTIONS[VALUE])

    def __call__(self) -> list[torch.Tensor]:
        """Return the sections, their tokens back, and the gradients of both ways."""
        sections, back = self.form.scatter(self.x), self.form.gather(self.y)
        back = back.view_as(self.pull)
        leaves = (self.x, self.y)
        d_x, d_y = torch.autograd.grad((*sections, back), leaves, (*self.grad_outputs, self.pull))
        natural = torch.empty_like(d_x)
        natural[..., self.form.columns()] = d_x
        return [*sections, back, natural, d_y]


def measured(
    rank: int,
    world: int,
    tokens: int,
    sequences: Sequence[int],
    rounds: int,
    dtype: torch.dtype,
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Return (seconds, processor seconds) of each round by form and sequences, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    timings: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for count in sequences:
        total = tokens * world
        cut = SequenceSharding.of(total, world, cu_seqlens=range(0, total + 1, total // count))
        layers = {
            form.__name__: Layer(
                form(cut, groups["cp"], sections=SECTIONS, heads=HEADS),
                dtype,
            )
            for form in FORMS
        }
        _check(groups, layers, count)
        for index in range(WARMUP_ROUNDS + rounds):
            names = list(layers)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                dist.barrier()
                start, used = time.perf_counter(), time.process_time()
                _run(layers[name])
                timing = time.perf_counter() - start, time.process_time() - used
                if index >= WARMUP_ROUNDS:
                    timings.setdefault((name, count), []).append(timing)
    return timings


def _run(layer: Layer) -> None:
    """Run a layer, without what only a comparison needs."""
    sections, back = layer.form.scatter(layer.x), layer.form.gather(layer.y)
    outs = (*sections, back.view_as(layer.pull))
    torch.autograd.grad(outs, (layer.x, layer.y), (*layer.grad_outputs, layer.pull))


def _check(groups: ProcessGroupCollection, layers: dict[str, Layer], count: int) -> None:
    """Raise ValueError unless all forms return the same, by as many collectives as they say."""
    expected: list[torch.Tensor] = []
    collectives = {McoreForm: 4, Unfolded: 4, PerSequence: 14 * count}
    for layer in layers.values():
        with trace(groups) as records:
            got = layer()
        if len(records) != collectives[type(layer.form)]:
            raise ValueError(f"{type(layer.form).__name__}: {len(records)} collectives")
        expected = expected or got
        if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
            raise ValueError(f"{type(layer.form).__name__} returns something else")


def rows_of(
    tokens: int, sequences: Sequence[int], rounds: int, dtype: torch.dtype = torch.float32
) -> list[Row]:
    """Race the forms on gloo ranks."""
    ranks = gloo_ranks.run(measured, RANKS, tokens, tuple(sequences), rounds, dtype)
    short = str(dtype).removeprefix("torch.")
    table_rows = []
    for count in sequences:
        for form in FORMS[1:]:
            for unit, which, whole in (("ms", 0, max), ("cpu ms of all ranks", 1, sum)):
                mcore, peer = (
                    [whole(timing[which] for timing in step) for step in zip(*steps, strict=True)]
                    for steps in (
                        [rank[f.__name__, count] for rank in ranks] for f in (McoreForm, form)
                    )
                )
                table_rows.append(
                    compared(
                        bench="linear_exchange",
                        what=f"{RANKS} ranks, {count} sequences: {unit}, {short} / {form.__name__}",
                        mcore=1e3 * statistics.median(mcore),
                        peer=1e3 * statistics.median(peer),
                        ratio=statistics.median(b / a for a, b in zip(mcore, peer, strict=True)),
                        target=TARGETS.get((form, count), ">= 1" if form is Unfolded else ""),
                    )
                )
    return table_rows


def rows(quick: bool) -> list[Row]:
    """Race the forms with 4 and 16 sequences and, unless `quick`, with one and in bfloat16."""
    if quick:
        return rows_of(TOKENS, SEQUENCES[1:], 5)
    return [row for dtype in DTYPES.values() for row in rows_of(TOKENS, SEQUENCES, 15, dtype)]


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a rank")
    parser.add_argument("--sequences", type=int, nargs="+", default=list(SEQUENCES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    arguments = parser.parse_args()
    settings = (arguments.tokens, arguments.sequences, arguments.rounds, DTYPES[arguments.dtype])
    print(format_table(rows_of(*settings)))


if __name__ == "__main__":
    main()
