# SPDX-License-Identifier: Apache-2.0
"""A step of a hybrid model whose rows are cut over ranks, beside one whose recurrent layers
exchange each section of each sequence by itself.

python -m tools.bench.hybrid_step              4 gloo ranks, 16 sequences

One model, forward and backward; the two kinds of step take turns in the same processes. The other
kind exists here only, put in the place of the layers' own exchange.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from megatron.core.backend import LOCAL
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.all_to_all import RecurrenceOutput
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.ssm import GatedDeltaNetConfig, mixer
from megatron.core.transformer import AttentionConfig, MLPConfig
from tools.bench import gloo_ranks
from tools.bench.exchange_forms import PerSequence
from tools.bench.table import Row, compared, format_table

RANKS, TOKENS, SEQUENCES, PATTERN, VOCABULARY = 4, 256, 16, "G-G-G-*-", 512
DELTA = GatedDeltaNetConfig(
    num_key_heads=8, num_value_heads=8, key_channels=32, value_channels=32, conv_width=4
)
TARGET = ">= 2"
WARMUP_ROUNDS = 2
LOSS_ERROR = 1e-5  # relative


def config() -> GPTConfig:
    """Return the model."""
    return GPTConfig(
        num_layers=len(PATTERN),
        hidden_size=256,
        vocab_size=VOCABULARY,
        attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=64),
        mlp=MLPConfig(ffn_hidden_size=512),
        pattern=PATTERN,
        delta_net=DELTA,
    )


class HybridStep:
    """Forward and backward of one row of several sequences, each sharded over the ranks."""

    def __init__(self, groups: ProcessGroupCollection, *, tokens: int, sequences: int) -> None:
        group, total = groups["cp"], tokens * groups["cp"].size
        settings = DataParallelConfig()
        self.model = GPTModel(
            config(),
            groups,
            seed=3,
            storage=settings.storage(),
            backend=replace(LOCAL, linear_mode="headwise"),
        )
        self.engine = DataParallel(self.model.store, groups, config=settings)
        self.cut = SequenceSharding.of(
            total, group.size, cu_seqlens=range(0, total + 1, total // sequences)
        )
        self.layout = SequenceLayout.make(self.cut, group.rank, rows=1)
        source = torch.Generator().manual_seed(1)
        row = torch.randint(0, VOCABULARY, (1, total + 1), generator=source)
        self.tokens, self.labels = (self.layout.local(x) for x in (row[:, :-1], row[:, 1:]))
        self.weights = torch.full(self.tokens.shape, 1.0 / total)

    def __call__(self) -> float:
        """Return this rank's part of the loss."""
        self.engine.begin_step()
        loss, _ = self.model.loss(self.tokens, self.labels, self.weights, layout=self.layout)
        self.engine.backward(loss, last=True)
        self.engine.finish()
        return loss.item()


@contextlib.contextmanager
def per_sequence(cut: SequenceSharding, group: Group) -> Iterator[None]:
    """Make recurrent layers exchange each section of each sequence separately."""
    ratio = DELTA.num_value_heads // DELTA.num_key_heads
    keys = DELTA.key_channels
    sections = (keys, keys, ratio * DELTA.value_channels, ratio, ratio)
    form = PerSequence(cut, group, sections=sections, heads=DELTA.num_key_heads)

    def scatter_heads(x, layout, group):
        return torch.cat(form.moved(x[:, 0].split(sections, -1)), -1), None

    def gather_heads(y, layout, group):
        return RecurrenceOutput(form.gather(y.flatten(2)).flatten(0, 1).unflatten(-1, y.shape[2:]))

    with (
        mock.patch.object(mixer, "scatter_heads", scatter_heads),
        mock.patch.object(mixer, "gather_heads", gather_heads),
    ):
        yield


def measured(
    rank: int, world: int, tokens: int, sequences: int, rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """Return (seconds, processor seconds) of steps by their kind, and all-to-alls, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    step = HybridStep(groups, tokens=tokens, sequences=sequences)
    kinds = {
        "ours": contextlib.nullcontext,
        "per sequence": lambda: per_sequence(step.cut, groups["cp"]),
    }
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    losses, sent = {}, {}
    for index in range(WARMUP_ROUNDS + rounds):
        for name in sorted(kinds, reverse=index % 2 == 0):
            with kinds[name](), trace(groups) as records:
                dist.barrier()
                start, used = time.perf_counter(), time.process_time()
                losses[name] = step()
                timing = time.perf_counter() - start, time.process_time() - used
            sent[name] = sum(record.kind == "all_to_all" for record in records)
            if index >= WARMUP_ROUNDS:
                timings[name].append(timing)
    if abs(losses["ours"] - losses["per sequence"]) > LOSS_ERROR * abs(losses["ours"]):
        raise ValueError(f"losses differ: {losses}")
    return timings, sent


def rows_of(tokens: int, sequences: int, rounds: int) -> list[Row]:
    """Race the two kinds of step on gloo ranks."""
    ranks = gloo_ranks.run(measured, RANKS, tokens, sequences, rounds)
    sent = ranks[0][1]
    table_rows = []
    for unit, which, whole in (("ms", 0, max), ("cpu ms of all ranks", 1, sum)):
        mcore, peer = (
            [
                whole(timing[which] for timing in step)
                for step in zip(*(times[kind] for times, _ in ranks), strict=True)
            ]
            for kind in ("ours", "per sequence")
        )
        table_rows.append(
            compared(
                bench="hybrid_step",
                what=f"{RANKS} ranks of {tokens} tokens, {sequences} sequences: {unit}, "
                f"{sent['ours']} all-to-alls / {sent['per sequence']}",
                mcore=1e3 * statistics.median(mcore),
                peer=1e3 * statistics.median(peer),
                ratio=statistics.median(b / a for a, b in zip(mcore, peer, strict=True)),
                target=TARGET,
            )
        )
    return table_rows


def rows(quick: bool) -> list[Row]:
    """Race steps with 16 sequences."""
    return rows_of(TOKENS, SEQUENCES, 3 if quick else 9)


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a rank")
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print(format_table(rows_of(arguments.tokens, arguments.sequences, arguments.rounds)))


if __name__ == "__main__":
    main()
