# SPDX-License-Identifier: Apache-2.0
"""A GPT on the GPU: the CPU's weights, losses, gradients and tokens; its memory; NCCL; no syncs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.device import choose_device
from megatron.core.dist_checkpointing import (
    Solo,
    load_checkpoint,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.distributed import DataParallel
from megatron.core.inference.engine import Request
from megatron.core.inference.sampling import SamplingParams
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.closeness import relative_error
from tests.support.one_batch import generate

pytestmark = pytest.mark.gpu

SMALL = GPTConfig(
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
LARGE = GPTConfig(
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


def compare(mine, true, bound=2e-5):
    assert mine[0] == pytest.approx(true[0], rel=1e-6)
    errors = {name: relative_error(mine[1][name], true[1][name]) for name in true[1]}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bound, (worst, errors[worst])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_in_halves_has_the_gradients_of_the_whole(device, dtype):
    whole, halves = built(SMALL, device, dtype), built(SMALL, device, dtype)
    true = gradients(whole, DataParallel(whole.store, whole.groups), device)
    engine = DataParallel(halves.store, halves.groups)
    halves.store.splits = True
    tokens, labels, weights, ids = batch(SMALL, device)
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
    found = {n: h.main_grad.clone() for n, h in halves.store.handles.items()}
    # the rows of an embedding are added by atomics, in any order
    compare((loss.item(), found), true, bound=1e-6)


def test_initial_weights_are_the_cpus_bit_by_bit(device):
    here, there = built(SMALL, device), built(SMALL, CPU)
    for name, handle in there.store.handles.items():
        assert torch.equal(here.store.handles[name].param.cpu(), handle.param), name


def test_loss_and_every_gradient_are_the_cpus(device):
    found = []
    for where in (device, CPU):
        model = built(SMALL, where)
        found.append(gradients(model, DataParallel(model.store, model.groups), where))
    compare(*found)


def packed(model, engine, device, *, masks_by_ids=False):
    """Run a forward and backward over rows of documents, laid out on the host; return the same."""
    tokens, labels, weights, _ = batch(model.config, CPU)
    ids = torch.stack([torch.arange(128) >= border for border in (50, 101)]).int()
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
    attention = dataclasses.replace(SMALL.attention, window=40, sinks=True)
    config = dataclasses.replace(SMALL, attention=attention)
    found = []
    for where, by_ids in ((CPU, True), (device, True), (device, False)):
        model = built(config, where)
        engine = DataParallel(model.store, model.groups)
        packed(model, engine, where, masks_by_ids=by_ids)  # compiles the kernels
        found.append(packed(model, engine, where, masks_by_ids=by_ids))
    true, *others = found
    assert true[1]["decoder.blocks.0.attention.sinks"].abs().max() > 0
    for mine in others:
        compare(mine, true)


@pytest.mark.machine
def test_a_forward_and_backward_never_wait_for_the_gpu(device):
    model = built(SMALL, device, torch.bfloat16)
    engine = DataParallel(model.store, model.groups)
    gradients(model, engine, device)  # compiles the kernels
    tokens, labels, weights, ids = batch(SMALL, device)
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
def test_bf16_training_learns_and_needs_the_memory_it_should(device):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    model = built(LARGE, device, torch.bfloat16)
    engine = DataParallel(model.store, model.groups)
    optimizer = Optimizer(engine.owned(), model.groups)
    state = torch.cuda.memory_allocated(device) - before
    # 2 bytes of weight, 4 of gradient, 4 of master, 8 of moments.
    assert state <= 18.1 * model.store.num_parameters
    tokens, labels, weights, _ = batch(LARGE, device, size=2, length=1025)
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


def test_greedy_tokens_are_the_cpus(device):
    requests = [Request(prompt=(5, 17, 900)), Request(prompt=(1,) * 40, sequence=1)]
    plain = dataclasses.replace(SMALL, hidden_dropout=0.0)
    found = [
        [
            completion.tokens
            for completion in generate(
                built(plain, where),
                requests,
                max_new_tokens=32,
                sampling=SamplingParams(temperature=0),
            )
        ]
        for where in (device, CPU)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_of_the_gpu_loads_on_the_cpu(device, tmp_path, dtype):
    saved = built(SMALL, device, dtype)
    folder = save_checkpoint(tmp_path, 1, weight_chunks(saved.store), {}, coordinator=Solo())
    loaded = built(dataclasses.replace(SMALL, init_std=0.3), CPU, dtype)
    load_checkpoint(folder, weight_chunks(loaded.store), coordinator=Solo())
    back = built(dataclasses.replace(SMALL, init_std=0.3), device, dtype)
    load_checkpoint(folder, weight_chunks(back.store), coordinator=Solo())
    for name, handle in saved.store.handles.items():
        assert torch.equal(loaded.store.handles[name].param, handle.param.cpu()), name
        assert torch.equal(back.store.handles[name].param, handle.param), name


@pytest.fixture
def nccl(device):
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield ProcessGroupCollection.create(RankGrid(world_size=1, tp=1), rank=0, timeout_seconds=60)
    dist.destroy_process_group()


@pytest.mark.machine
def test_one_rank_of_nccl_computes_what_no_group_does(device, nccl):
    found = []
    for groups in (nccl, ProcessGroupCollection.single()):
        model = built(SMALL, device, groups=groups)
        found.append(gradients(model, DataParallel(model.store, groups), device))
    compare(*found, bound=1e-6)
    probe = torch.full((5,), 3.0, device=device)
    dist.all_reduce(probe)
    assert probe.tolist() == [3.0] * 5


@pytest.mark.machine
def test_a_gpu_beyond_the_last_is_refused(device):
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"this machine has {count}"):
        choose_device("cuda", count)
