# SPDX-License-Identifier: Apache-2.0
"""A GPT on the GPU matches the CPU's weights, losses, gradients and tokens; memory; NCCL; syncs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron.core import ProcessGroupCollection, RankGrid, choose_device
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.dist_checkpointing import (
    Solo,
    load_checkpoint,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.distributed import DataParallel
from megatron.core.inference import EngineRequest, SamplingParams
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.closeness import relative_error
from tests.support.one_batch import generate

pytestmark = pytest.mark.gpu

SMALL_CONFIG = GPTConfig(
    num_layers=3,
    hidden_size=192,
    vocab_size=1003,
    attention=AttentionConfig(
        num_attention_heads=6, num_query_groups=2, kv_channels=64, qk_norm=True, dropout=0.1
    ),
    mlp=MLPConfig(ffn_hidden_size=320),
    hidden_dropout=0.1,
    init_std=0.1,
)
#: 218 M weights.
LARGE_CONFIG = GPTConfig(
    num_layers=12,
    hidden_size=1024,
    vocab_size=32000,
    attention=AttentionConfig(num_attention_heads=8, num_query_groups=8, kv_channels=128),
    mlp=MLPConfig(ffn_hidden_size=2816),
)
CPU = torch.device("cpu")


def built(config, device, dtype=torch.float32, groups=None):
    return GPTModel(
        config, groups or ProcessGroupCollection.single(), seed=3, dtype=dtype, device=device
    )


def batch(config, device, *, size=2, length=129):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (size, length), generator=generator)
    weights = torch.rand(size, length - 1, generator=generator) / size / length
    ids = torch.arange(size) + 5
    tokens, weights, ids = (x.to(device) for x in (tokens, weights, ids))
    return tokens[:, :-1], tokens[:, 1:], weights, ids


def gradients(model, engine, device):
    """Run one forward and backward; return loss and the gradient of every weight."""
    tokens, labels, weights, ids = batch(model.config, device)
    engine.begin_step()
    loss, _ = model.loss(
        tokens,
        labels,
        weights,
        layout=SequenceLayout.of_rows(tokens.shape[1], sample_ids=ids, device=tokens.device),
    )
    engine.backward(loss, last=True)
    engine.finish()
    return loss.item(), {n: h.main_grad.clone() for n, h in model.store.handles.items()}


def compare(actual, expected, bound=2e-5):
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    errors = {name: relative_error(actual[1][name], expected[1][name]) for name in expected[1]}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bound, (worst, errors[worst])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_backward_matches_whole_backward(device, dtype):
    whole, halves = built(SMALL_CONFIG, device, dtype), built(SMALL_CONFIG, device, dtype)
    expected = gradients(whole, DataParallel(whole.store, whole.groups), device)
    engine = DataParallel(halves.store, halves.groups)
    halves.store.splits = True
    tokens, labels, weights, ids = batch(SMALL_CONFIG, device)
    engine.begin_step()
    loss, _ = halves.loss(
        tokens,
        labels,
        weights,
        layout=SequenceLayout.of_rows(tokens.shape[1], sample_ids=ids, device=tokens.device),
    )
    with halves.store.defer() as queue:
        engine.backward(loss, last=False)
    assert len(queue) > 0
    engine.begin_last_backward(0)
    queue.drain()
    engine.post_backward(0)
    engine.finish()
    grads = {n: h.main_grad.clone() for n, h in halves.store.handles.items()}
    # Atomics add the rows of an embedding in any order.
    compare((loss.item(), grads), expected, bound=1e-6)


def test_initial_weights_equal_the_cpu_bitwise(device):
    on_gpu, on_cpu = built(SMALL_CONFIG, device), built(SMALL_CONFIG, CPU)
    for name, handle in on_cpu.store.handles.items():
        assert torch.equal(on_gpu.store.handles[name].param.cpu(), handle.param), name


def test_loss_and_gradients_match_the_cpu(device):
    pair = []
    for target in (device, CPU):
        model = built(SMALL_CONFIG, target)
        pair.append(gradients(model, DataParallel(model.store, model.groups), target))
    compare(*pair)


def packed(model, engine, device, *, masks_by_ids=False):
    """Run a forward and backward over packed documents; return loss and gradients."""
    tokens, labels, weights, _ = batch(model.config, CPU)
    ids = torch.stack([torch.arange(128) >= boundary for boundary in (50, 101)]).int()
    rows = {"document_ids": ids, "masks_by_ids": masks_by_ids, "device": device}
    layout = SequenceLayout.make(SequenceSharding.of(128, 1), 0, rows=2, **rows)
    tokens, labels, weights = (x.contiguous().to(device) for x in (tokens, labels, weights))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.begin_step()
        loss, _ = model.loss(tokens, labels, weights, layout=layout)
        engine.backward(loss, last=True)
        engine.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return loss.item(), {n: h.main_grad.clone() for n, h in model.store.handles.items()}


@pytest.mark.machine
def test_documents_window_and_sinks_match_cpu_without_syncs(device):
    attention = dataclasses.replace(SMALL_CONFIG.attention, window=40, sinks=True)
    config = dataclasses.replace(SMALL_CONFIG, attention=attention)
    runs = []
    for target, by_ids in ((CPU, True), (device, True), (device, False)):
        model = built(config, target)
        engine = DataParallel(model.store, model.groups)
        packed(model, engine, target, masks_by_ids=by_ids)  # compiles the kernels
        runs.append(packed(model, engine, target, masks_by_ids=by_ids))
    expected, *gpu_runs = runs
    assert expected[1]["decoder.blocks.0.attention.sinks"].abs().max() > 0
    for actual in gpu_runs:
        compare(actual, expected)


@pytest.mark.machine
def test_forward_and_backward_do_not_sync(device):
    model = built(SMALL_CONFIG, device, torch.bfloat16)
    engine = DataParallel(model.store, model.groups)
    gradients(model, engine, device)  # compiles the kernels
    tokens, labels, weights, ids = batch(SMALL_CONFIG, device)
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.begin_step()
        loss, _ = model.loss(
            tokens,
            labels,
            weights,
            layout=SequenceLayout.of_rows(tokens.shape[1], sample_ids=ids, device=tokens.device),
        )
        engine.backward(loss, last=True)
        engine.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.machine
def test_bf16_training_learns_within_expected_memory(device):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    model = built(LARGE_CONFIG, device, torch.bfloat16)
    engine = DataParallel(model.store, model.groups)
    optimizer = Optimizer(engine.owned(), model.groups)
    state = torch.cuda.memory_allocated(device) - before
    # 2 bytes of weight, 4 of gradient, 4 of master, 8 of moments.
    assert state <= 18.1 * model.store.num_parameters
    tokens, labels, weights, _ = batch(LARGE_CONFIG, device, size=2, length=1025)
    losses = []
    for _ in range(20):
        engine.begin_step()
        loss, _ = model.loss(tokens, labels, weights / weights.sum())
        engine.backward(loss, last=True)
        engine.finish()
        assert optimizer.step(3e-4).applied
        engine.start_param_sync()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(10.4, abs=0.4)
    assert losses[-1] < losses[0] - 2.0, losses


def test_greedy_tokens_match_the_cpu(device):
    requests = [EngineRequest(prompt=(5, 17, 900)), EngineRequest(prompt=(1,) * 40, sequence=1)]
    plain = dataclasses.replace(SMALL_CONFIG, hidden_dropout=0.0)
    tokens_by_device = [
        [
            completion.tokens
            for completion in generate(
                built(plain, target),
                requests,
                max_new_tokens=32,
                sampling=SamplingParams(temperature=0),
            )
        ]
        for target in (device, CPU)
    ]
    assert tokens_by_device[0] == tokens_by_device[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_checkpoint_loads_on_the_cpu(device, tmp_path, dtype):
    saved = built(SMALL_CONFIG, device, dtype)
    folder = save_checkpoint(tmp_path, 1, weight_chunks(saved.store), {}, coordinator=Solo())
    loaded = built(dataclasses.replace(SMALL_CONFIG, init_std=0.3), CPU, dtype)
    load_checkpoint(folder, weight_chunks(loaded.store), coordinator=Solo())
    reloaded = built(dataclasses.replace(SMALL_CONFIG, init_std=0.3), device, dtype)
    load_checkpoint(folder, weight_chunks(reloaded.store), coordinator=Solo())
    for name, handle in saved.store.handles.items():
        assert torch.equal(loaded.store.handles[name].param, handle.param.cpu()), name
        assert torch.equal(reloaded.store.handles[name].param, handle.param), name


@pytest.fixture
def nccl(device):
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield ProcessGroupCollection.create(RankGrid(world_size=1, tp=1), rank=0, timeout_seconds=60)
    dist.destroy_process_group()


@pytest.mark.machine
def test_nccl_group_of_one_rank_matches_no_group(device, nccl):
    pair = []
    for groups in (nccl, ProcessGroupCollection.single()):
        model = built(SMALL_CONFIG, device, groups=groups)
        pair.append(gradients(model, DataParallel(model.store, groups), device))
    compare(*pair, bound=1e-6)
    probe = torch.full((5,), 3.0, device=device)
    dist.all_reduce(probe)
    assert probe.tolist() == [3.0] * 5


@pytest.mark.machine
def test_gpu_index_out_of_range_is_refused(device):
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"this machine has {count}"):
        choose_device("cuda", count)
