# SPDX-License-Identifier: Apache-2.0
"""Programs that put work on several streams, for `StreamModel`: each returns what it computed.

None of them reads a tensor on the host before its end, so that the host is as far ahead of the
device as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from megatron.core.comm.collectives import reduce_scatter_fp32_async
from megatron.core.dist_checkpointing.async_save import StagingBuffer
from megatron.core.dist_checkpointing.shards import plan_shard
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.engine import Engine, EngineConfig, Request, generate
from megatron.core.inference.sampling import SamplingParams
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import HostUpdates
from megatron.core.pipeline_parallel import make_schedule, with_transfers
from megatron.core.pipeline_parallel.runtime import Executor
from megatron.core.process_groups import RankGrid
from tests.support.stream_model import StreamModel
from tests.unit_tests.core.dist_checkpointing.layouts import whole
from tests.unit_tests.core.distributed.engine_steps import update
from tests.unit_tests.core.distributed.small_model import SmallModel, tokens
from tests.unit_tests.core.optimizer.gradient_steps import Training
from tests.unit_tests.core.pipeline_parallel.line import Line, slope, start

BF16 = torch.bfloat16
WIDE = {"grad_dtype": BF16, "fp32_accumulation": True}
LATER = {"fsdp_all_gather_in_start_param_sync": False}
#: One on demand, one to plan by, one after the evaluation, one that prefetches.
STEPS = 4
FLAT = RankGrid(world_size=2)
HYBRID = RankGrid(world_size=4, instances=2)
GTP = RankGrid(world_size=4, gtp=2)
VOCABULARY = 11


def engine_steps(
    device: StreamModel, *, strategy: str, grid: RankGrid = FLAT, **settings: object
) -> list[Tensor]:
    """Train with gathers and reductions that overlap, and an evaluation between two steps; return
    the losses and the weights."""
    config = DataParallelConfig(
        strategy=strategy,
        overlap_param_gather=strategy != "no_shard",
        **settings,  # type: ignore[arg-type]
    )
    model = SmallModel(device.groups(grid), config=config)
    engine = DataParallel(model.store, model.store.groups, config=config)
    # Before the first step, weights that are read are gathered on demand.
    results = [model.store.handles["third"].get().clone()]
    for step in range(STEPS):
        engine.begin_step(2)
        for i in range(2):
            loss = model.loss(*tokens(0, i))
            results.append(loss.detach())
            engine.backward(loss, last=i == 1)
        engine.finish()
        update(engine)
        engine.start_param_sync()
        if step == 1:
            with engine.evaluation():
                results.append(model.loss(*tokens(0, 5)).detach())
        if step == 2:
            with engine.evaluation():
                pass  # what was started early is not needed
        if step:
            for pool in (engine.pool, *(gatherer.pool for gatherer in engine.gatherers)):
                pool.trim()
    engine.complete_weights()
    with engine.evaluation():
        results += [handle.get().clone() for handle in model.store.handles.values()]
    assert all(gatherer.counts.prefetched for gatherer in engine.gatherers)
    return results


class LateLine(Line):
    """Straight lines whose results are read by nobody before the end."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.results: list[Tensor] = []

    def forward(self, chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        """Return w x + microbatch."""
        stage = self.schedule.virtual_stage(self.rank, chunk)
        x = start(microbatch) if hidden is None else hidden
        self._kept[chunk, microbatch] = x
        return slope(stage) * x + microbatch

    def backward(
        self, chunk: int, microbatch: int, grad: Tensor | None, *, split: bool
    ) -> Tensor | None:
        """Return w dy; the weight's gradient is x · dy."""
        assert grad is not None
        self.results.append((self._kept.pop((chunk, microbatch)) * grad).sum())
        return slope(self.schedule.virtual_stage(self.rank, chunk)) * grad

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Do nothing more."""


def pipeline_step(device: StreamModel, name: str, rank: int) -> list[Tensor]:
    """Run one of three stages; return its gradients and what it has sent."""
    groups = device.groups(RankGrid(world_size=3, pp=3), rank=rank)
    schedule = with_transfers(make_schedule(name, stages=3, microbatches=12))
    line = LateLine(schedule, rank)
    Executor(schedule, line, group=groups["pp"], backward_group=groups["pp_backward"]).run()
    device.run_all()
    return line.results + device.sent


def saves(device: StreamModel) -> list[Tensor]:
    """Stage tensors that training goes on changing; return what each save held."""
    tensors = {f"w{i}": torch.arange(12.0 + i).view(-1, 1) * 0.37 for i in range(3)}
    tensors["strided"] = (torch.arange(24.0) * 0.11).view(4, 6)[:, ::2]
    staging = StagingBuffer(plan_shard(whole(tensors), 0))
    results = []
    for _ in range(3):
        for tensor in tensors.values():
            tensor.mul_(1.25).add_(0.5)
        staging.begin()
        rest = torch.ones(3) * 2
        staging.release()  # the saver's thread has no copies of the host's own to make
        staging.synchronize_staging()
        for tensor in tensors.values():
            tensor.mul_(rest[0])
        staging.complete_copy()
        results.append(staging._memory[staging._header_bytes :].clone())
    staging.close()
    return results


def host_updates(device: StreamModel, dtype: torch.dtype) -> list[Tensor]:
    """Update weights in host memory; return the weights after each step."""
    groups = device.groups(RankGrid(world_size=1))
    config = OptimizerConfig(kind="sgd", sgd_momentum=0.9, clip_grad=0.0, offload_fraction=1.0)
    training = Training(groups, config, dtype=dtype, bucket_bytes=1)
    states = training.optimizer.ranges
    updates = HostUpdates(states, torch.device("cpu"))
    assert len(states) > 4
    results = []
    for step in range(3):
        for state in states:
            gradients = state.owned.gradients
            gradients.copy_(torch.arange(1.0 * len(gradients)).add_(step).mul_(0.01))
            results.append(state.owned.weights.sum())
        updates.begin()
        beside = torch.ones(5).sum()
        updates.run(lambda state, gradients: state.master.sub_(gradients.to(state.master.dtype)))
        results += [state.owned.weights.clone() for state in states] + [beside]
    return results


class SuccessorTable(torch.nn.Module):
    """A model whose logits depend on the token before alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self
        self.logits = torch.sin(torch.arange(float(VOCABULARY**2))).view(VOCABULARY, VOCABULARY) * 3

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return hidden states as they are."""
        return hidden

    project = whole = gathered

    def forward(self, tokens: Tensor, **context: object) -> Tensor:
        """Return the logits [t, 1, V] of tokens [1, t]."""
        return self.logits.index_select(0, tokens.view(-1))[:, None]


def generation(device: StreamModel) -> list[Tensor]:
    """Generate in the asynchronous loop of the engine; return tokens and log-probabilities."""
    engine = Engine(
        SuccessorTable(),
        EngineConfig(num_blocks=99, asynchronous=True),
        shapes=CacheShapes(),
        vocab_size=VOCABULARY,
    )
    requests = [
        Request(
            prompt=(n,),
            max_new_tokens=6,
            sampling=SamplingParams(temperature=0.8 * (n % 2), logprobs=2, seed=n),
        )
        for n in range(4)
    ]
    completions = [c for (c,) in generate(engine, requests)]
    assert engine.stats.overlapped == engine.stats.steps - 1
    return [torch.tensor([*c.tokens, *c.logprobs]) for c in completions]


def fp32_sum(device: StreamModel) -> list[Tensor]:
    """Sum in fp32 out of memory of its own, started on a stream beside; return the sums."""
    group = device.groups(FLAT)["dp"]
    stream, results = device.new_stream(), []
    for i in range(4):
        x, out = torch.arange(8, dtype=BF16) + i, torch.empty(4)
        stream.wait_stream(device.current)
        with device.on_stream(stream):
            pending = reduce_scatter_fp32_async(x, group, out=out)
            free = pending.work.receive_buffer.clone()  # type: ignore[union-attr]
        results.append(pending.wait().clone())
        del pending
        with device.on_stream(stream):
            free.add_(1.0)
    return results


Program = Callable[[StreamModel], list[Tensor]]

_ENGINES: tuple[tuple[str, dict[str, object]], ...] = (
    ("no_shard", {}),
    ("no_shard hybrid bf16", {"grid": HYBRID, "grad_dtype": BF16}),
    ("optim", {}),
    ("optim hybrid later", {"grid": HYBRID, **LATER}),
    ("optim wide", WIDE),
    ("optim_grads hybrid", {"grid": HYBRID}),
    ("optim_grads wide later", {**WIDE, **LATER}),
    ("optim_grads_params", {}),
    (
        "optim_grads_params by weight",
        {"granularity": "weight", "prefetch_bytes": 200, **WIDE},
    ),
    ("optim_grads_params hybrid", {"grid": HYBRID, **WIDE}),
    ("optim_grads_params outer", {"grid": HYBRID, "outer": "optim"}),
    ("optim_grads_params outer later", {"grid": HYBRID, "outer": "optim", **LATER}),
    ("no_shard gtp", {"grid": GTP}),
    ("optim gtp mxfp8", {"grid": GTP, "gather_format": "mxfp8", **WIDE}),
    ("optim_grads gtp later", {"grid": GTP, **LATER}),
)

PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        **{
            name: partial(engine_steps, strategy=name.split()[0], **settings)
            for name, settings in _ENGINES
        },
        "1f1b": partial(pipeline_step, name="1f1b", rank=1),
        "zb-h1": partial(pipeline_step, name="zb-h1", rank=1),
        "pipelined forward": partial(pipeline_step, name="forward", rank=0),
        "saves": saves,
        "updates on the host": partial(host_updates, dtype=torch.float32),
        "updates on the host bf16": partial(host_updates, dtype=BF16),
        "wide sum": fp32_sum,
        "generation": generation,
    }
)


def run(
    program: Program, seed: int | None, *, without: str | None = None
) -> tuple[list[Tensor], StreamModel]:
    """Run a program in one interleaving; return its results on the host, and the device.

    Raises:
        RuntimeError: memory was written after it was free.
    """
    device = StreamModel(seed, without=without)
    with device.enforced():
        results = [result.cpu() for result in program(device)]
        device.check_freed()
    return results, device
