# SPDX-License-Identifier: Apache-2.0
"""One training step under our engine, torch DDP or FSDP2, with the seconds of its three parts.

All train the weights of one GPT from the same values: clip the gradient, then fused AdamW without
decay of norms.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import Optimizer
from megatron.core.process_groups import ProcessGroupCollection
from tools.bench import shapes
from tools.bench.gloo_ranks import CPU, LOSS, STEP, Measured
from tools.bench.mcore_step import OPTIMIZER, config_of
from tools.bench.plain_model import PlainModel, copy_weights
from tools.bench.shapes import Shape

FORWARD, BACKWARD, UPDATE = PHASES = ("forward", "backward", "update")
#: A batch's tokens and labels, each int64 [b, s].
Batch = tuple[torch.Tensor, torch.Tensor]
TimedStep = Callable[[Batch], Measured]


def batch_of(shape: Shape, rank: int, index: int) -> Batch:
    """Return the tokens and labels of one step of one rank."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    size = (shape.batch, shape.sequence + 1)
    tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def timed(
    forward: Callable[[Batch], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    update: Callable[[], None],
    *,
    loss_share: float = 1.0,
) -> TimedStep:
    """Return a step of three phases, with a clock between them.

    `CPU` counts all threads of the process, including communication threads, but no waiting.

    Args:
        forward: returns the loss of a batch.
        backward: takes the loss, and reduces the gradients.
        update: updates the weights.
        loss_share: a rank's part of the mean over ranks, by which its loss is multiplied.
    """

    def step(batch: Batch) -> Measured:
        cpu, start = time.process_time(), time.perf_counter()
        loss = forward(batch)
        middle = time.perf_counter()
        backward(loss)
        reduced = time.perf_counter()
        update()
        end = time.perf_counter()
        return {
            FORWARD: middle - start,
            BACKWARD: reduced - middle,
            UPDATE: end - reduced,
            STEP: end - start,
            CPU: time.process_time() - cpu,
            LOSS: loss_share * loss.item(),
        }

    return step


class McoreStep:
    """A training step of Megatron's model and engine.

    Args:
        groups: the process groups; every rank is a data-parallel rank.
        config: config of the engine.
        bucket_bytes: fp32 gradient bytes of a bucket, if weights are not sharded.

    Attributes:
        step: takes a batch.
    """

    def __init__(
        self,
        shape: Shape,
        groups: ProcessGroupCollection,
        *,
        config: DataParallelConfig,
        bucket_bytes: int,
    ) -> None:
        self.model = GPTModel(
            config_of(shape),
            groups,
            seed=shapes.SEED,
            storage=config.storage(bucket_bytes=bucket_bytes),
        )
        self.engine = DataParallel(self.model.store, groups, config=config)
        self.optimizer = Optimizer(self.engine.owned(), groups, config=OPTIMIZER)
        factor = 1.0 / (shape.tokens * groups["dense_dp"].size)
        self.weights = torch.full((shape.batch, shape.sequence), factor)
        self.step = timed(self._forward, self._backward, self._update)

    def _forward(self, batch: Batch) -> torch.Tensor:
        self.engine.begin_step()
        return self.model.loss(*batch, self.weights)[0]

    def _backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss, last=True)
        self.engine.finish()

    def _update(self) -> None:
        self.optimizer.step(shapes.LEARNING_RATE, shapes.WEIGHT_DECAY)
        self.engine.start_param_sync()


class TorchStep:
    """A step of the plain module under torch's data parallelism.

    Args:
        ours: the model whose weights it starts from.
        wrap: makes the module data parallel, in place or by another around it.

    Attributes:
        step: takes a batch.
    """

    def __init__(
        self, shape: Shape, mcore: GPTModel, *, wrap: Callable[[PlainModel], nn.Module]
    ) -> None:
        plain = PlainModel(shape)
        copy_weights(plain, mcore, shape)
        self.model = wrap(plain)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": shapes.WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=shapes.LEARNING_RATE,
            betas=shapes.BETAS,
            eps=shapes.EPSILON,
            fused=True,
        )
        # torch's loss is a mean over the ranks of each rank's mean.
        self.weights = torch.full((shape.batch, shape.sequence), 1.0 / shape.tokens)
        share = 1.0 / torch.distributed.get_world_size()
        self.step = timed(self._forward, self._backward, self._update, loss_share=share)

    def _forward(self, batch: Batch) -> torch.Tensor:
        return self.model(*batch, self.weights)

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), shapes.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def ddp(plain: PlainModel, *, bucket_bytes: int) -> nn.Module:
    """Wrap in DistributedDataParallel, gradients as views of its buckets."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        plain, bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True
    )


def fsdp2(plain: PlainModel, *, reshard: bool = True) -> nn.Module:
    """Apply `fully_shard` to every layer and to the root, which holds both vocabularies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in plain.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(plain, mesh=mesh)
