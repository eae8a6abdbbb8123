# SPDX-License-Identifier: Apache-2.0
"""Training steps of the small network, compared with an fp64 reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megatron.core import ProcessGroupCollection
from megatron.core.boxes import Box
from megatron.core.comm import CollectiveRecord
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import (
    BucketSize,
    ElementBytes,
    Traffic,
    collectives_per_step,
)
from tests.support.closeness import assert_close_by_metric, assert_piece_close
from tests.support.gatherers import gatherer_of
from tests.unit_tests.core.distributed.small_model import SmallModel, plain_loss, tokens

LEARNING_RATE = 0.002
#: fp32 rounding through six products and a few steps; a wrong term is above 1e-2.
BOUND = 5e-6


def build_engine(
    groups: ProcessGroupCollection,
    *,
    bucket_bytes: int = 1,
    freeze: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> tuple[SmallModel, DataParallel]:
    """Return a model and its engine, with unused buffers full of NaN."""
    settings = DataParallelConfig(**{"debug": True, **config})  # type: ignore[arg-type]
    model = SmallModel(groups, config=settings, bucket_bytes=bucket_bytes, dtype=dtype)
    model.store.freeze(*freeze)
    engine = DataParallel(model.store, groups, config=settings)
    for handle in model.store.handles.values():
        if handle.main_grad is not None:
            handle.main_grad.fill_(torch.nan)
    return model, engine


def train(
    model: SmallModel, engine: DataParallel, indices: Sequence[int], *, spare: bool = True
) -> list[float]:
    """Run a step over this rank's microbatches up to the gradients; return the losses."""
    dp_rank, losses = engine.groups["dense_dp"].rank, []
    engine.begin_step(len(indices))
    for i in indices:
        loss = model.loss(*tokens(dp_rank, i), spare=spare)
        losses.append(loss.item())
        engine.backward(loss, last=i == indices[-1])
    engine.finish()
    return losses


def update(engine: DataParallel) -> None:
    """Apply an SGD update to the ranges that this rank owns."""
    for owned in engine.owned():
        for start, stop in owned.decayed + owned.undecayed:
            owned.weights[start:stop] -= LEARNING_RATE * owned.gradients[start:stop]


class Reference:
    """The same network in fp64, unsharded, with plain autograd over all ranks' data."""

    def __init__(self, num_ranks: int, *, frozen: Sequence[str] = ()) -> None:
        self.num_ranks, self.frozen = num_ranks, frozen
        store = SmallModel(ProcessGroupCollection.single()).store
        self.weights = {n: h.get().double() for n, h in store.handles.items()}

    def gradients(self, indices: Sequence[int], *, spare: bool = True) -> dict[str, torch.Tensor]:
        """Return the gradients of the loss summed over all ranks' microbatches."""
        leaves = {n: w.clone().requires_grad_() for n, w in self.weights.items()}
        for dp_rank in range(self.num_ranks):
            for i in indices:
                plain_loss(leaves, *tokens(dp_rank, i), spare=spare).backward()
        return {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}

    def update(self, gradients: dict[str, torch.Tensor]) -> None:
        """Apply the same SGD update."""
        for name, gradient in gradients.items():
            if name not in self.frozen:
                self.weights[name] = self.weights[name] - LEARNING_RATE * gradient


def slice_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the slice of a logical tensor that a box covers."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def assert_gradients(
    engine: DataParallel,
    expected: dict[str, torch.Tensor],
    *,
    bound: float = BOUND,
    zeros: Sequence[str] = (),
) -> int:
    """Compare the gradients that the optimizer reads, zero for names in `zeros`.

    Returns: the number of elements compared.
    """
    num_elements = 0
    for owned in engine.owned():
        assert owned.gradients.isfinite().all(), "padding included"
        for box in owned.boxes:
            gradient = box.of(owned.gradients)
            num_elements += box.numel
            if box.name in zeros:
                assert not gradient.any(), box.name
            else:
                assert_piece_close(box.name, gradient, expected[box.name], box.offsets, bound=bound)
    return num_elements


def assert_weights(
    engine: DataParallel, expected: dict[str, torch.Tensor], *, bound: float = BOUND
) -> None:
    """Compare every full weight, gathered in an evaluation."""
    with engine.evaluation():
        for name, handle in engine.store.handles.items():
            assert_close_by_metric(name, handle.get().clone(), expected[name], bound=bound)


def train_and_compare(
    model: SmallModel,
    engine: DataParallel,
    reference: Reference,
    steps: Sequence[Sequence[int]],
    *,
    bound: float = BOUND,
) -> None:
    """Train the model and the reference, and compare all gradients of every step."""
    for indices in steps:
        train(model, engine, indices)
        gradients = reference.gradients(indices)
        assert_gradients(engine, gradients, bound=bound)
        update(engine)
        engine.start_param_sync()
        reference.update(gradients)


def planned_gathers(engine: DataParallel) -> list[int] | None:
    """Return how often the current plan gathers each block; None without weight sharding."""
    gatherer = gatherer_of(engine)
    if gatherer is None or not gatherer.reshards:
        return None
    assert gatherer.current_plan is not None
    counts = Counter(gatherer.current_plan.prologue)
    for use in gatherer.current_plan.uses:
        counts.update(use.all_gather)
    blocks = [block for bucket in engine.store.buckets for block in bucket.blocks]
    directed_blocks = [directed for block in blocks for directed in block.directions]
    return [
        counts[directed.index] if directed.gatherer is gatherer else 0
        for directed in directed_blocks
    ]


def expected_traffic(engine: DataParallel, microbatches: int) -> list[Traffic]:
    """Return the traffic of a step by the formula, from one parameter sync to the next."""
    return collectives_per_step(
        [BucketSize.of(bucket) for bucket in engine.store.buckets],
        engine.placement,
        element_bytes=ElementBytes(
            gradient=engine.config.grad_dtype.itemsize, fp32_sum=engine.config.fp32_accumulation
        ),
        microbatches=microbatches,
        gathers=planned_gathers(engine),
    )


def assert_traffic(
    engine: DataParallel, records: Sequence[CollectiveRecord], microbatches: int
) -> None:
    """Compare the traffic since a parameter sync, by kind and group, with the formula."""
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for record in records:
        if record.dtype == "int64":  # debug mode compares the order of uses
            continue
        counts[record.kind, record.group] += 1
        sent[record.kind, record.group] += record.bytes
    actual = [Traffic(*key, counts[key], sent[key]) for key in sorted(counts)]
    expected = expected_traffic(engine, microbatches)
    if actual != expected:
        raise AssertionError(f"{engine.config}: sent\n{actual}, expected\n{expected}")
