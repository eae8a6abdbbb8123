# SPDX-License-Identifier: Apache-2.0
"""A few training steps of one row, on any number of ranks, with results in logical form.

`train_row` runs on every rank of a row and, as the reference, in the test's process on a grid
of one rank. Each rank returns its chunks of the logical tensors; `assembled` joins the chunks and
asserts that every element exists and that replicas are equal bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.core import Backend, ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.comm import CollectiveRecord, trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import (
    BucketSize,
    ElementBytes,
    Traffic,
    collectives_per_step,
)
from megatron.core.extensions import QuantizationConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import Balance, RouterLoad, routers_of
from megatron.core.optimizer import (
    ConstantLossScaler,
    Optimizer,
    OptimizerConfig,
    OptimizerStepResult,
)
from megatron.core.pipeline_parallel import Action
from megatron.core.transformer import MLPConfig, NormConfig, Recompute
from megatron.core.weight_gather.gather_format import gather_formats
from megatron.core.weight_gather.gatherer import GatherCounts
from megatron.training.step import TrainStep
from tests.parity.experts import (
    activation_settings,
    attention_config,
    moe_config,
    multipliers_of,
    rope_config,
    watched_routes,
)
from tests.parity.gather_format import compute_with_encoded
from tests.parity.pieces import LogicalChunk, local_chunks, write_weights
from tests.parity.recurrent import LAYERS, decoder_settings, epsilon_of, mtp_config, pattern_of
from tests.parity.rows import shards_over_gtp
from tests.parity.sequences import SEQUENCE, local_microbatch, with_bounds, with_documents
from tests.parity.stages import StageBlocks, pipeline, stage_blocks, stage_split
from tests.support import te_extension, te_wheel
from tests.support.covering_array import Row
from tests.support.inputs import Microbatch, microbatch, one_thread
from tests.support.mutants import Mutation, apply
from tests.support.nan_memory import nan_memory
from tests.support.ranks import rank_device
from tests.support.simulated_links import Late, simulated

HIDDEN, HEADS, HEAD_DIM, FFN = 36, 8, 6, 52
BATCH = 3
#: Sizes for FP8, which needs multiples of 32.
ALIGNED = {"hidden": 64, "heads": 8, "channels": 16, "ffn": 128, "batch": 4}
WEIGHT_DECAY = 0.1
SEED = 7
RECOMPUTE = {
    "none": Recompute(),
    "full": Recompute(granularity="full", method="uniform", num_layers=LAYERS),
    "selective": Recompute(granularity="selective"),
}
BUCKET_BYTES = {"small": 5_000, "large": 10**9}
#: SGD is the proof. Adam and Muon normalise the gradient, so a wrong factor hardly shows; Adam's
#: epsilon is so large that rounding of small gradients does not change the sign of steps.
OPTIMIZERS = {
    "sgd": OptimizerConfig(kind="sgd", clip_grad=0.0, count_zeros=True),
    "adam": OptimizerConfig(kind="adam", adam_eps=1e-3, count_zeros=True),
    "muon": OptimizerConfig(kind="muon", adam_eps=1e-3, count_zeros=True),
}


def steps_of(row: Row) -> int:
    """Return the number of steps: with prefetched gathers, the third step is the first planned."""
    if "steps" in row:
        return row["steps"]
    return 3 if row["early_gather"] or shards_over_gtp(row) else 2


def rate_of(row: Row) -> float:
    """Return the learning rate of a row: large for SGD, but not so large that a recurrent mixer, or
    a norm of outputs, diverges and amplifies rounding; small for other optimizers."""
    if "rate" in row:
        return row["rate"]
    if row.get("optimizer", "sgd") != "sgd":
        return 0.01
    if row["norm_placement"] != "pre":
        return 0.02
    return 0.3 if row["mixer"] is None else 0.1


def data_parallel_config(row: Row) -> DataParallelConfig:
    """Return the data-parallel config of a row; late collectives enable poisoned buffers."""
    return DataParallelConfig(
        strategy=row["placement"],
        outer=row["outer"],
        granularity=row["granularity"],
        overlap_grad_reduce=row["overlap"],
        overlap_param_gather=row["early_gather"],
        gtp_reduce_scatter_per=row["reduce_scatter"],
        gather_format=row["wire"],
        gather_scale_blocks=row.get("scale_blocks", "2d"),
        debug=row["link"] == "late",
    )


@dataclass
class Step:
    """Observations of one step on one rank."""

    loss: float
    nll: list[torch.Tensor]
    grad_norm: float
    zeros: int | None
    gradients: list[LogicalChunk]
    records: list[CollectiveRecord]
    launched_in_backward: int
    outer_in_backward: int
    dp_traffic: list[Traffic]
    gathers: list[GatherCounts]
    in_flight: list[int]
    actions: list[Action] = field(default_factory=list)
    sure: bool = True


@dataclass
class Run:
    """Observations of a run on one rank."""

    initial: list[LogicalChunk]
    buckets: list[BucketSize]
    over_gtp: list[str]
    stage: StageBlocks
    late: int = 0
    leased_bytes: int = 0
    steps: list[Step] = field(default_factory=list)
    loads: list[RouterLoad] = field(default_factory=list)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    margin: float = math.inf
    dropped: int = 0
    weights: list[LogicalChunk] = field(default_factory=list)
    te_calls: dict[str, int] = field(default_factory=dict)


def sizes_of(row: Row) -> Mapping[str, int]:
    """Return the sizes of a row's model and batch."""
    if row.get("aligned"):
        return ALIGNED
    return {"hidden": HIDDEN, "heads": HEADS, "channels": HEAD_DIM, "ffn": FFN, "batch": BATCH}


def gpt_config(row: Row) -> GPTConfig:
    """Return the model of a row."""
    sizes = sizes_of(row)
    return GPTConfig(
        **decoder_settings(row, LAYERS),
        hidden_size=sizes["hidden"],
        vocab_size=row["vocabulary"],
        attention=attention_config(row, heads=sizes["heads"], channels=sizes["channels"]),
        mlp=MLPConfig(
            ffn_hidden_size=sizes["ffn"],
            **activation_settings(row),
            bias=row["bias"] == "all",
        ),
        norm=NormConfig(
            kind=row["norm"],
            epsilon=epsilon_of(row),
            zero_centered=row.get("zero_centered", False),
            placement=row["norm_placement"],
        ),
        rope=rope_config(row),
        max_position_embeddings=None if row["positions"] == "rope" else SEQUENCE,
        tied=row["tied"],
        hidden_dropout=row["dropout"],
        moe=moe_config(row),
        mtp=mtp_config(row),
        multipliers=multipliers_of(row),
    )


def data_of_rank(row: Row, dp_rank: int, step: int) -> list[Microbatch]:
    """Return the microbatches of a data-parallel rank in one step, as whole rows."""
    numbers = [step * row["accumulation"] + i for i in range(row["accumulation"])]
    batches = [
        microbatch(
            seed=row.get("seed", SEED),
            dp_rank=dp_rank,
            index=number,
            batch=sizes_of(row)["batch"],
            sequence=SEQUENCE,
            vocabulary=row["vocabulary"],
        )
        for number in numbers
    ]
    return [with_documents(row, batch, n) for batch, n in zip(batches, numbers, strict=True)]


def train_row(
    row: Row,
    groups: ProcessGroupCollection,
    initial: Mapping[str, torch.Tensor] | None,
    *,
    dp_ranks: Iterable[int],
) -> Run:
    """Train the steps of `row` on this rank.

    Args:
        initial: logical initial weights; None trains nothing and returns the model's initial
            values.
        dp_ranks: data-parallel ranks whose microbatches this rank trains on.
    """
    config = data_parallel_config(row)
    backend = _backend(row)
    model = GPTModel(
        gpt_config(row),
        groups,
        sequence_parallel=row["sequence_parallel"],
        seed=SEED,
        storage=config.storage(bucket_bytes=BUCKET_BYTES[row["bucket"]]),
        split=stage_split(row, pattern_of(row, LAYERS)) if groups["pp"].size > 1 else None,
        backend=backend,
        device=rank_device(),
    )
    model.set_recompute(RECOMPUTE[row["recompute"]])
    model.store.freeze(*(n for n in model.store.handles if n.endswith(row.get("frozen", ()))))
    engine = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(
        engine.owned(),
        groups,
        config=OPTIMIZERS[row.get("optimizer", "sgd")],
        scaler=ConstantLossScaler(row["loss_scale"]),
        weights=[handle.sharding for handle in model.store.handles.values()],
    )
    run = Run(
        initial=local_chunks(model.store),
        buckets=[BucketSize.of(bucket) for bucket in model.store.buckets],
        stage=stage_blocks(row, model, engine),
        over_gtp=[handle.name for b in model.store.buckets if b.gtp for handle in b.handles],
    )
    if initial is None:
        return run
    write_weights(model.store, initial)
    balance = _balance(model, groups)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(simulated(groups, Late())) if row["link"] == "late" else None
        for step in range(steps_of(row)):
            batches = (batch for rank in dp_ranks for batch in data_of_rank(row, rank, step))
            batches = [_local(row, groups, batch).to(rank_device()) for batch in batches]
            if backend.step_state is not None:
                backend.step_state.begin()
            run.steps.append(_trained(row, model, engine, optimizer, batches))
            if backend.step_state is not None:
                backend.step_state.finish(groups)
            if balance is not None:
                balance.finish(applied=True)
        engine.start_param_sync(force_sync=True)
        run.late = 0 if link is None else link.count
    pools = [engine.pool, *(gatherer.pool for gatherer in engine.gatherers)]
    run.leased_bytes = sum(pool.live_bytes for pool in pools)
    run.weights = local_chunks(model.store)
    run.states = model.store.states
    run.te_calls = dict(te_extension.CALLS)
    run.loads = [] if balance is None else balance.report()
    return run


def _backend(row: Row) -> Backend:
    return replace(
        transformer_engine(row["te"], row.get("quantization")) if "te" in row else LOCAL,
        context_engine=row["engine"],
        linear_mode=row["linear_mode"],
        dispatcher=row["dispatcher"],
        overlap_shared_expert=row["overlap"],
        gtp_opt_in_modules=row.get("opt_in", ()),
    )


def transformer_engine(release: str, quantization: QuantizationConfig | None = None) -> Backend:
    """Return the backend of TransformerEngine's Python code on the fake extension; call it in a
    separate process."""
    if "transformer_engine" not in sys.modules:
        mxfp8 = quantization is not None and quantization.recipe == "mxfp8"
        te_extension.install(te_wheel.tree(release), (10, 0) if mxfp8 else (9, 0))
    module = importlib.import_module("megatron.core.extensions.transformer_engine")
    return module.backend(LOCAL, quantization)


def _balance(model: GPTModel, groups: ProcessGroupCollection) -> Balance | None:
    """Return the load balance of experts; None without experts."""
    if model.config.moe is None:
        return None
    names, world = model.config.router_names, groups["world"]
    return Balance(routers_of(model), names, config=model.config.moe, world=world)


def _local(row: Row, groups: ProcessGroupCollection, batch: Microbatch) -> Microbatch:
    """Return a rank's shard of a microbatch; a single process has the whole microbatch."""
    if groups["world"].size > 1:
        return local_microbatch(row, batch, groups["cp"].rank, rank_device())
    finds_documents = row["mixer"] is not None or "te" in row
    return with_bounds(batch, rank_device()) if finds_documents else batch


def _trained(
    row: Row,
    model: GPTModel,
    engine: DataParallel,
    optimizer: Optimizer,
    microbatches: list[Microbatch],
) -> Step:
    """Train one step and return its observations."""
    watch = _Watch(model, engine, optimizer)
    if row["wire"] != "bf16" and engine.groups["world"].size == 1:
        formats = gather_formats(row["wire"], scale_blocks=row.get("scale_blocks", "2d"))
        watch.sure, watch.before_update = compute_with_encoded(model.store, formats)
    actions: list[Action] = []
    train = TrainStep(
        watch,
        engine,
        optimizer=watch,
        groups=engine.groups,
        forward_backward=pipeline(row, watch, engine, actions.append),
        per_token_loss=row["per_token"],
    )
    with trace(engine.groups) as records:
        report = train(microbatches, lr=rate_of(row), weight_decay=WEIGHT_DECAY)
    return Step(
        loss=report.loss,
        nll=watch.nll,
        grad_norm=report.grad_norm,
        zeros=report.num_zeros,
        gradients=watch.gradients,
        # int64: debug mode compares the order of needs
        records=[r for r in records if r.dtype != "int64"],
        launched_in_backward=engine.launched_in_backward,
        outer_in_backward=engine.outer_in_backward,
        dp_traffic=_expected_dp_traffic(row, engine),
        gathers=[copy.copy(gatherer.counts) for gatherer in engine.gatherers],
        in_flight=[len(gatherer.in_flight) for gatherer in engine.gatherers],
        actions=actions,
        sure=watch.sure,
    )


def _expected_dp_traffic(row: Row, engine: DataParallel) -> list[Traffic]:
    """Return the expected data-parallel traffic of the step, by the formula and the plan."""
    counts: Counter[int] = Counter()
    for gatherer in engine.gatherers:
        gathered_blocks = gatherer.blocks
        if not gatherer.reshards:
            counts.update(id(block) for block in gathered_blocks if block.trainable)
        elif gatherer.current_plan is not None:
            counts.update(id(gathered_blocks[index]) for index in gatherer.current_plan.prologue)
            for use in gatherer.current_plan.uses:
                counts.update(id(gathered_blocks[index]) for index in use.all_gather)
    blocks = [block for bucket in engine.store.buckets for block in bucket.blocks]
    gathers = [counts[id(directed)] for block in blocks for directed in block.directions]
    return collectives_per_step(
        [BucketSize.of(bucket) for bucket in engine.store.buckets],
        engine.placement,
        element_bytes=ElementBytes(gtp_once=row["reduce_scatter"] == "step"),
        microbatches=row["accumulation"],
        gathers=gathers,
    )


class _Watch:
    """A proxy of a model and an optimizer that records losses and gradients of a step."""

    def __init__(self, model: GPTModel, engine: DataParallel, optimizer: Optimizer) -> None:
        self.model, self.engine, self.optimizer = model, engine, optimizer
        self.scaler = optimizer.scaler
        self.owned = engine.owned()
        self.nll: list[torch.Tensor] = []
        self.gradients: list[LogicalChunk] = []
        self.sure = True
        self.before_update: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a chunk without a head."""
        return self.model(*args, **kwargs)

    def loss(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        token_weights: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the loss of every token; apply the loss scale after the model."""
        scale = self.scaler.scale
        if "mtp_targets" in kwargs:
            kwargs["mtp_targets"] = kwargs["mtp_targets"].scaled(1.0 / scale)
        loss, nll = self.model.loss(tokens, labels, token_weights / scale, **kwargs)
        self.nll.append(nll.clone())
        return (loss if scale == 1.0 else loss * scale), nll

    def grad_norm(self) -> float:
        """Return the optimizer's gradient norm."""
        return self.optimizer.grad_norm()

    def step(
        self, lr: float, weight_decay: float, *, norm: float | None = None, **kwargs: float | None
    ) -> OptimizerStepResult:
        """Record the gradients without the loss scale.

        Raises:
            AssertionError: if a value was never written, including padding and frozen weights.
        """
        if not all(bool(owned.gradients.isfinite().all()) for owned in self.owned):
            raise AssertionError("a gradient or the padding between gradients is not finite")
        self.gradients = [
            LogicalChunk(
                p.name,
                p.shape,
                p.box.offsets,
                p.of(owned.gradients) / self.scaler.scale,
                p.replica_ranks,
            )
            for owned in self.owned
            for p in owned.boxes
        ]
        self.before_update()
        return self.optimizer.step(lr, weight_decay, norm=norm, **kwargs)


def rank_of_row(
    rank: int,
    world: int,
    row: Row,
    initial: Mapping[str, torch.Tensor],
    faults: Sequence[Mutation] = (),
) -> Run:
    """Train a row as one of its ranks, with planted `faults`."""
    for fault in faults:
        apply(fault)
    sizes = {axis: row[axis] for axis in ("tp", "gtp", "cp", "pp", "instances", "ep", "egtp")}
    sizes["etp"] = None if row["experts"] is None else row["etp"]
    grid = RankGrid(world_size=world, **sizes)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    with nan_memory():
        return train_row(row, groups, initial, dp_ranks=[groups["samples"].rank])


def single_run(row: Row, initial: Mapping[str, torch.Tensor] | None) -> Run:
    """Train a row in this process: one rank with the data of all data-parallel ranks, without
    recomputation."""
    plain_row = {**row, "recompute": "none", "link": "none"}
    with one_thread(), watched_routes(row) as margins:
        run = train_row(
            plain_row,
            ProcessGroupCollection.single(),
            initial,
            dp_ranks=range(row["dp"] * row["gtp"]),
        )
    run.margin, run.dropped = margins.smallest, margins.dropped
    if not all(step.sure for step in run.steps):
        run.margin = 0.0
    return run
