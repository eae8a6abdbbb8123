# SPDX-License-Identifier: Apache-2.0
"""Training steps of the small network, beside an fp64 reference that goes the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megatron.core.boxes import Box
from megatron.core.comm import CollectiveRecord
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import (
    BucketSize,
    ElementBytes,
    Traffic,
    collectives_per_step,
)
from megatron.core.process_groups import ProcessGroupCollection
from tests.support.closeness import assert_close_by_metric, assert_piece_close
from tests.support.gatherers import gatherer_of
from tests.unit_tests.core.distributed.small_model import SmallModel, plain_loss, tokens

LEARNING_RATE = 0.002
#: fp32 through six products, and what a few steps make of that; a wrong term is above 1e-2.
BOUND = 5e-6


def built(
    groups: ProcessGroupCollection,
    *,
    bucket_bytes: int = 1,
    freeze: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> tuple[SmallModel, DataParallel]:
    """Return a model and its engine, whose unused buffers hold NaN."""
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
    """Run a step over this lane's microbatches up to its gradients; return their losses."""
    lane, losses = engine.groups["dense_dp"].rank, []
    engine.begin_step(len(indices))
    for i in indices:
        loss = model.loss(*tokens(lane, i), spare=spare)
        losses.append(loss.item())
        engine.backward(loss, last=i == indices[-1])
    engine.finish()
    return losses


def update(engine: DataParallel) -> None:
    """Let the optimizer, SGD, write what this rank owns, and nothing else."""
    for owned in engine.owned():
        for start, stop in owned.decayed + owned.undecayed:
            owned.weights[start:stop] -= LEARNING_RATE * owned.gradients[start:stop]


class Reference:
    """The same network in fp64, whole, with autograd alone, over the data of all lanes."""

    def __init__(self, lanes: int, *, frozen: Sequence[str] = ()) -> None:
        self.lanes, self.frozen = lanes, frozen
        store = SmallModel(ProcessGroupCollection.single()).store
        self.weights = {n: h.get().double() for n, h in store.handles.items()}

    def gradients(self, indices: Sequence[int], *, spare: bool = True) -> dict[str, torch.Tensor]:
        """Return the gradients of the sum over all lanes' microbatches."""
        leaves = {n: w.clone().requires_grad_() for n, w in self.weights.items()}
        for lane in range(self.lanes):
            for i in indices:
                plain_loss(leaves, *tokens(lane, i), spare=spare).backward()
        return {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}

    def update(self, gradients: dict[str, torch.Tensor]) -> None:
        """Take the optimizer's step."""
        for name, gradient in gradients.items():
            if name not in self.frozen:
                self.weights[name] = self.weights[name] - LEARNING_RATE * gradient


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the part of a logical tensor that a box holds."""
    for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole


def assert_gradients(
    engine: DataParallel,
    wanted: dict[str, torch.Tensor],
    *,
    bound: float = BOUND,
    zeros: Sequence[str] = (),
) -> int:
    """Compare what the optimizer would see, zero in `zeros`; return the number of elements."""
    found = 0
    for owned in engine.owned():
        assert owned.gradients.isfinite().all(), "padding included"
        for placed in owned.boxes:
            got = placed.of(owned.gradients)
            found += placed.numel
            if placed.name in zeros:
                assert not got.any(), placed.name
            else:
                assert_piece_close(
                    placed.name, got, wanted[placed.name], placed.offsets, bound=bound
                )
    return found


def assert_weights(
    engine: DataParallel, wanted: dict[str, torch.Tensor], *, bound: float = BOUND
) -> None:
    """Compare every whole weight, gathered as an evaluation would."""
    with engine.evaluation():
        for name, handle in engine.store.handles.items():
            assert_close_by_metric(name, handle.get().clone(), wanted[name], bound=bound)


def steps_against(
    model: SmallModel,
    engine: DataParallel,
    reference: Reference,
    steps: Sequence[Sequence[int]],
    *,
    bound: float = BOUND,
) -> None:
    """Train whole steps on both sides and compare all gradients of each."""
    for indices in steps:
        train(model, engine, indices)
        wanted = reference.gradients(indices)
        assert_gradients(engine, wanted, bound=bound)
        update(engine)
        engine.start_param_sync()
        reference.update(wanted)


def planned_gathers(engine: DataParallel) -> list[int] | None:
    """Return how often the plan being followed gathers each bucket; None if weights are whole."""
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
    """Return what a step must send by the formula, from one parameter sync to the next."""
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
    """Compare what was sent since a parameter sync, by kind and group, with the formula."""
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for record in records:
        if record.dtype == "int64":  # debug mode compares the order of needs
            continue
        counts[record.kind, record.group] += 1
        sent[record.kind, record.group] += record.bytes
    found = [Traffic(*key, counts[key], sent[key]) for key in sorted(counts)]
    wanted = expected_traffic(engine, microbatches)
    if found != wanted:
        raise AssertionError(f"{engine.config}: sent\n{found}, wanted\n{wanted}")
