# SPDX-License-Identifier: Apache-2.0
"""Programs that use several streams, for `StreamModel`: each returns its computed tensors.

No program reads a tensor on the host before it ends, so that the host runs as far ahead of the
device as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from megatron.core import RankGrid
from megatron.core.comm.collectives import reduce_scatter_fp32_async
from megatron.core.dist_checkpointing.async_save import StagingBuffer
from megatron.core.dist_checkpointing.save_plan import plan_shard
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.inference import (
    Engine,
    EngineConfig,
    EngineRequest,
    SamplingParams,
    generate,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import HostUpdates
from megatron.core.pipeline_parallel import Executor, make_schedule, with_transfers
from tests.support.stream_model import StreamModel
from tests.support.stub_model import StubModel
from tests.unit_tests.core.dist_checkpointing.layouts import full_chunks
from tests.unit_tests.core.distributed.engine_steps import update
from tests.unit_tests.core.distributed.small_model import SmallModel, tokens
from tests.unit_tests.core.optimizer.gradient_steps import Training
from tests.unit_tests.core.pipeline_parallel.line import LinearWorker, first_input, stage_weight

BF16 = torch.bfloat16
FP32_SUM = {"grad_dtype": BF16, "fp32_accumulation": True}
LATE_SYNC = {"fsdp_all_gather_in_start_param_sync": False}
#: A step with gathers on demand, a step that records the plan, a step after the evaluation and a
#: step that prefetches.
STEPS = 4
FLAT = RankGrid(world_size=2)
HYBRID = RankGrid(world_size=4, instances=2)
GTP = RankGrid(world_size=4, gtp=2)
VOCABULARY = 11


def engine_steps(
    device: StreamModel, *, strategy: str, grid: RankGrid = FLAT, **settings: object
) -> list[Tensor]:
    """Train with overlapped gathers and reductions and evaluations between steps; return the losses
    and the weights."""
    config = DataParallelConfig(
        strategy=strategy,
        overlap_param_gather=strategy != "no_shard",
        **settings,  # type: ignore[arg-type]
    )
    model = SmallModel(device.groups(grid), config=config)
    engine = DataParallel(model.store, model.store.groups, config=config)
    # Before the first step, weights are gathered on demand.
    tensors = [model.store.handles["third"].get().clone()]
    for step in range(STEPS):
        engine.begin_step(2)
        for i in range(2):
            loss = model.loss(*tokens(0, i))
            tensors.append(loss.detach())
            engine.backward(loss, last=i == 1)
        engine.finish()
        update(engine)
        engine.start_param_sync()
        if step == 1:
            with engine.evaluation():
                tensors.append(model.loss(*tokens(0, 5)).detach())
        if step == 2:
            with engine.evaluation():
                pass  # the gathers started early are unused
        if step:
            for pool in (engine.pool, *(gatherer.pool for gatherer in engine.gatherers)):
                pool.trim()
    engine.complete_weights()
    with engine.evaluation():
        tensors += [handle.get().clone() for handle in model.store.handles.values()]
    assert all(gatherer.counts.prefetched for gatherer in engine.gatherers)
    return tensors


class UnreadLine(LinearWorker):
    """Linear stages whose outputs are not read on the host before the end."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.results: list[Tensor] = []

    def forward(self, chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        """Return w x + microbatch."""
        stage = self.schedule.virtual_stage(self.rank, chunk)
        x = first_input(microbatch) if hidden is None else hidden
        self._saved_inputs[chunk, microbatch] = x
        return stage_weight(stage) * x + microbatch

    def backward(
        self, chunk: int, microbatch: int, grad: Tensor | None, *, split: bool
    ) -> Tensor | None:
        """Return dx = w dy and record the weight's gradient x · dy."""
        assert grad is not None
        self.results.append((self._saved_inputs.pop((chunk, microbatch)) * grad).sum())
        return stage_weight(self.schedule.virtual_stage(self.rank, chunk)) * grad

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Do nothing: `backward` has recorded the gradient."""


def pipeline_step(device: StreamModel, name: str, rank: int) -> list[Tensor]:
    """Run one of three stages; return its gradients and the tensors it sent."""
    groups = device.groups(RankGrid(world_size=3, pp=3), rank=rank)
    schedule = with_transfers(make_schedule(name, stages=3, microbatches=12))
    line = UnreadLine(schedule, rank)
    Executor(schedule, line, group=groups["pp"], backward_group=groups["pp_backward"]).run()
    device.run_all()
    return line.results + device.sent


def async_save(device: StreamModel) -> list[Tensor]:
    """Stage tensors that training keeps changing; return the staged bytes of each save."""
    tensors = {f"w{i}": torch.arange(12.0 + i).view(-1, 1) * 0.37 for i in range(3)}
    tensors["strided"] = (torch.arange(24.0) * 0.11).view(4, 6)[:, ::2]
    staging = StagingBuffer(plan_shard(full_chunks(tensors), 0))
    staged = []
    for _ in range(3):
        for tensor in tensors.values():
            tensor.mul_(1.25).add_(0.5)
        staging.begin()
        factors = torch.ones(3) * 2
        staging.release()  # no tensor is in host memory, so the saver's thread copies nothing
        staging.synchronize_staging()
        for tensor in tensors.values():
            tensor.mul_(factors[0])
        staging.complete_copy()
        staged.append(staging._memory[staging._header_bytes :].clone())
    staging.close()
    return staged


def host_updates(device: StreamModel, dtype: torch.dtype) -> list[Tensor]:
    """Update weights in host memory; return the weights after each step."""
    groups = device.groups(RankGrid(world_size=1))
    config = OptimizerConfig(kind="sgd", sgd_momentum=0.9, clip_grad=0.0, offload_fraction=1.0)
    training = Training(groups, config, dtype=dtype, bucket_bytes=1)
    states = training.optimizer.ranges
    updates = HostUpdates(states, torch.device("cpu"))
    assert len(states) > 4
    tensors = []
    for step in range(3):
        for state in states:
            gradients = state.owned.gradients
            gradients.copy_(torch.arange(1.0 * len(gradients)).add_(step).mul_(0.01))
            tensors.append(state.owned.weights.sum())
        updates.begin()
        overlapped = torch.ones(5).sum()
        updates.run(lambda state, gradients: state.master.sub_(gradients.to(state.master.dtype)))
        tensors += [state.owned.weights.clone() for state in states] + [overlapped]
    return tensors


class SuccessorTable(StubModel):
    """A model whose logits depend only on the previous token."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.logits = torch.sin(torch.arange(float(VOCABULARY**2))).view(VOCABULARY, VOCABULARY) * 3

    def __call__(self, tokens: Tensor, **context: object) -> Tensor:
        """Return the logits [t, 1, V] of tokens [1, t]."""
        return self.logits.index_select(0, tokens.view(-1))[:, None]


def generation(device: StreamModel) -> list[Tensor]:
    """Generate with the engine's asynchronous loop; return tokens and log-probabilities."""
    engine = Engine(SuccessorTable(), EngineConfig(num_blocks=99, asynchronous=True))
    requests = [
        EngineRequest(
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
    """Reduce in fp32 from a receive buffer, started on a side stream; return the sums."""
    group = device.groups(FLAT)["dp"]
    stream, sums = device.new_stream(), []
    for i in range(4):
        x, out = torch.arange(8, dtype=BF16) + i, torch.empty(4)
        stream.wait_stream(device.current)
        with device.on_stream(stream):
            pending = reduce_scatter_fp32_async(x, group, out=out)
            free = pending.work.receive_buffer.clone()  # type: ignore[union-attr]
        sums.append(pending.wait().clone())
        del pending
        with device.on_stream(stream):
            free.add_(1.0)
    return sums


Program = Callable[[StreamModel], list[Tensor]]

_ENGINES: tuple[tuple[str, dict[str, object]], ...] = (
    ("no_shard", {}),
    ("no_shard hybrid bf16", {"grid": HYBRID, "grad_dtype": BF16}),
    ("optim", {}),
    ("optim hybrid late sync", {"grid": HYBRID, **LATE_SYNC}),
    ("optim fp32 sum", FP32_SUM),
    ("optim_grads hybrid", {"grid": HYBRID}),
    ("optim_grads fp32 sum late sync", {**FP32_SUM, **LATE_SYNC}),
    ("optim_grads_params", {}),
    (
        "optim_grads_params by weight",
        {"granularity": "weight", "prefetch_bytes": 200, **FP32_SUM},
    ),
    ("optim_grads_params hybrid", {"grid": HYBRID, **FP32_SUM}),
    ("optim_grads_params outer", {"grid": HYBRID, "outer": "optim"}),
    ("optim_grads_params outer late sync", {"grid": HYBRID, "outer": "optim", **LATE_SYNC}),
    ("no_shard gtp", {"grid": GTP}),
    ("optim gtp mxfp8", {"grid": GTP, "gather_format": "mxfp8", **FP32_SUM}),
    ("optim_grads gtp late sync", {"grid": GTP, **LATE_SYNC}),
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
        "async save": async_save,
        "host updates": partial(host_updates, dtype=torch.float32),
        "host updates bf16": partial(host_updates, dtype=BF16),
        "fp32 sum": fp32_sum,
        "generation": generation,
    }
)


def run(
    program: Program, seed: int | None, *, without: str | None = None
) -> tuple[list[Tensor], StreamModel]:
    """Run a program in one interleaving; return its tensors on the host, and the device.

    Raises:
        RuntimeError: memory was written after it was freed.
    """
    device = StreamModel(seed, without=without)
    with device.enforced():
        tensors = [tensor.cpu() for tensor in program(device)]
        device.check_freed()
    return tensors, device
