# SPDX-License-Identifier: Apache-2.0
"""What reaching a weight through a handle costs on one rank, against `F.linear` and autograd.

The matrices are so small that only the calls are timed. A chain of layers is run forward and
backward, ours under the engine, theirs over leaves whose gradients autograd stores; the order
changes every round, and a figure is the median over rounds of the difference per weight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import WeightSharding
from tools.bench.table import Row, compared

LAYERS, SIZE, TOKENS = 64, 8, 4
Chain = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layers:
    """A chain of layers.

    Args:
        forward, backward: the timed functions.
        end: untimed function that ends a step.
    """

    forward: Chain
    backward: Callable[[torch.Tensor], None]
    end: Callable[[], None] = lambda: None


def our_chain(strategy: str) -> Layers:
    """Return a chain of handles on one rank."""
    groups = ProcessGroupCollection.single()
    store = WeightStore(groups)
    handles = [
        store.declare(WeightSharding.of(f"layer{i}", (SIZE, SIZE)), InitSpec.normal(0.3))
        for i in range(LAYERS)
    ]
    config = DataParallelConfig(strategy=strategy)
    store.materialize(config.storage())
    engine = DataParallel(store, groups, config=config)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for handle in handles:
            x = handle.linear(x)
        return x

    def backward(loss: torch.Tensor) -> None:
        engine.set_is_last_backward(True)
        loss.backward()

    def begin_and_forward(x: torch.Tensor) -> torch.Tensor:
        engine.begin_step()
        return forward(x)

    return Layers(begin_and_forward, backward, engine.finish)


def plain_chain() -> Layers:
    """Return a chain of leaves."""
    leaves = [torch.randn(SIZE, SIZE).mul_(0.3).requires_grad_() for _ in range(LAYERS)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for leaf in leaves:
            leaf.grad = None
        for leaf in leaves:
            x = F.linear(x, leaf)
        return x

    return Layers(forward, torch.Tensor.backward)


def rows(quick: bool) -> list[Row]:
    """Measure microseconds per weight of forward and backward."""
    torch.set_num_threads(1)
    rounds = 60 if quick else 400
    chains = {"ours": our_chain("optim_grads_params"), "plain": plain_chain()}
    x = torch.randn(TOKENS, SIZE)
    seconds: dict[str, list[list[float]]] = {name: [] for name in chains}
    for turn in range(rounds + rounds // 10):
        names = list(chains) if turn % 2 else list(chains)[::-1]
        for name in names:
            measured = _measure(chains[name], x)
            if turn >= rounds // 10:
                seconds[name].append(measured)
    table_rows = []
    for index, what in enumerate(("forward", "backward")):
        mcore = [1e6 * s[index] / LAYERS for s in seconds["ours"]]
        plain = [1e6 * s[index] / LAYERS for s in seconds["plain"]]
        difference = statistics.median(a - b for a, b in zip(mcore, plain, strict=True))
        for name, figure, peer, target in (
            (f"us per weight and {what}", statistics.median(mcore), statistics.median(plain), ""),
            (f"us more than F.linear, {what}", difference, None, "<= 5"),
        ):
            table_rows.append(
                compared(
                    bench="data_parallel",
                    what=f"1 rank: {name}",
                    mcore=figure,
                    peer=peer,
                    ratio=None,
                    target=target,
                )
            )
    return table_rows


def _measure(layers: Layers, x: torch.Tensor) -> Sequence[float]:
    """Return the processor seconds of forward and of backward: other programs do not count."""
    start = time.process_time()
    loss = layers.forward(x)
    middle = time.process_time()
    total = loss.sum()
    begun = time.process_time()
    layers.backward(total)
    end = time.process_time()
    layers.end()
    return [middle - start, end - begun]
