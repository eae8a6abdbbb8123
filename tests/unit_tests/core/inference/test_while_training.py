# SPDX-License-Identifier: Apache-2.0
"""An engine whose model is trained between generations."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.inference import Engine, EngineRequest, SamplingParams, generate
from megatron.core.models import GPTConfig, GPTModel, InferenceOptimizedModel
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.closeness import assert_close_by_metric
from tests.support.one_batch import engine_of
from tests.support.ranks import run_ranks

CONFIG = GPTConfig(
    num_layers=3,
    hidden_size=24,
    vocab_size=61,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=32),
    init_std=0.5,
)
PROMPT = tuple(range(7, 40))


def generate_tokens(engine: Engine) -> list[int]:
    """Return the tokens that follow the prompt."""
    request = EngineRequest(
        prompt=PROMPT, max_new_tokens=8, sampling=SamplingParams(temperature=0), sequence=1
    )
    return generate(engine, [request])[0][0].tokens


def train_and_generate(rank: int, world: int, strategy: str, generates: bool) -> tuple[list, list]:
    """Return the losses of four steps and the text generated before each step."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    config = DataParallelConfig(strategy=strategy)
    model = GPTModel(CONFIG, groups, seed=3, storage=config.storage(bucket_bytes=10_000))
    trainer = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(trainer.owned(), groups, config=OptimizerConfig(kind="sgd"))
    engine = engine_of(model)
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(rank))
    losses, texts = [], []
    for _ in range(4):
        if generates:
            texts.append(generate_tokens(engine))
        trainer.begin_step(1)
        mask = torch.full(tokens[:, 1:].shape, 1 / (16 * world))
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], mask)
        trainer.backward(loss, last=True)
        trainer.finish()
        optimizer.step(0.5)
        trainer.start_param_sync()
        engine.weights_replaced()
        losses.append(loss.item())
    return losses, texts


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_generation_does_not_change_training(strategy: str) -> None:
    training_only = run_ranks(train_and_generate, 2, strategy, False)
    runs = run_ranks(train_and_generate, 2, strategy, True)
    assert [losses for losses, _ in runs] == [losses for losses, _ in training_only]
    assert runs[0][1] == runs[1][1]
    assert len({tuple(text) for text in runs[0][1]}) > 2  # the new weights generate other texts


def logprobs_of_tokens(engine: Engine) -> torch.Tensor:
    """Return the log-probabilities of the tokens that follow the prompt."""
    request = EngineRequest(
        prompt=PROMPT, max_new_tokens=4, sampling=SamplingParams(temperature=0), sequence=1
    )
    return torch.tensor(generate(engine, [request])[0][0].logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", ["in place", "train step"])
def test_optimized_forward_uses_updated_weights(update: str, dtype: torch.dtype) -> None:
    groups = ProcessGroupCollection.single()
    config = DataParallelConfig()
    model = GPTModel(
        CONFIG, groups, dtype=dtype, seed=3, storage=config.storage(bucket_bytes=9_999)
    )
    trainer = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(trainer.owned(), groups, config=OptimizerConfig(kind="sgd"))
    engine, plain = (engine_of(model, prefix_caching=False) for _ in range(2))
    engine.runner.model = InferenceOptimizedModel(model)
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    logprobs = [logprobs_of_tokens(engine)]
    for step in range(2):  # without a call of `weights_replaced`
        if update == "in place":
            with torch.no_grad():
                for n, weight in enumerate(model.parameters()):
                    weight.mul_(1 + 0.2 * math.sin(n + step + 1))
        else:
            trainer.begin_step(1)
            loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], torch.full((2, 8), 1 / 16))
            trainer.backward(loss, last=True)
            trainer.finish()
            optimizer.step(0.5)
            trainer.start_param_sync()
        logprobs.append(logprobs_of_tokens(engine))
        fresh = engine_of(model, prefix_caching=False)
        fresh.runner.model = InferenceOptimizedModel(model)
        assert torch.equal(logprobs[-1], logprobs_of_tokens(fresh))
        # In bf16 the two forwards differ as much from each other as each differs from fp32.
        if dtype is torch.float32:
            assert_close_by_metric("update", logprobs[-1], logprobs_of_tokens(plain), bound=1e-4)
        assert (logprobs[-1] - logprobs[-2]).abs().max() > 0.1
