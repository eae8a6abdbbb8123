# SPDX-License-Identifier: Apache-2.0
"""Decode graphs against eager steps; a tape stands in for CUDA graphs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.cpu_graph import CpuGraph
from megatron.core.inference import Completion, Engine, decode_graphs, generate, model_runner
from megatron.core.inference.decode_graphs import bucket_sizes
from megatron.core.models import GPTModel, InferenceOptimizedModel
from megatron.core.models.inference_optimized import matrices
from megatron.core.weight_gather import copy_weights
from tests.support.device_products import products_of_a_gpu
from tests.support.inputs import one_thread
from tests.support.op_tape import OpTape, TapeRecorder
from tests.support.ranks import run_ranks
from tests.support.strict_recorder import HostRead, MemoryGrowth, StrictRerun, StrictTape
from tests.unit_tests.core.inference.test_engine import (
    DRAWN,
    FAMILIES,
    engine_of,
    model_of,
    requests,
)
from tests.unit_tests.core.inference.test_speculation import flawed_proposer


@pytest.fixture
def gpu_expert_products():
    with products_of_a_gpu():
        yield


def generate_outputs(engine: Engine, count: int = 5) -> list[tuple[list[int], list[float]]]:
    completions: list[list[Completion]] = generate(engine, requests(DRAWN)[:count])
    return [(c.tokens, c.logprobs) for outputs in completions for c in outputs]


@pytest.mark.parametrize(
    ("family", "optimized", "drafts"),
    [
        ("window and sinks", True, False),
        ("window and sinks", True, True),
        ("latent", False, True),
        ("hybrid", False, False),
        ("hybrid", True, False),
        ("experts", False, False),
        ("experts", True, True),
    ],
)
@pytest.mark.usefixtures("gpu_expert_products")
def test_replays_are_bit_identical_to_eager_steps(
    family: str, optimized: bool, drafts: bool
) -> None:
    model = model_of(family)
    forward_model = InferenceOptimizedModel(model) if optimized else model
    recorders: list[StrictTape] = []

    def strict() -> StrictTape:
        recorders.append(StrictTape())
        return recorders[-1]

    outputs, expected = [], generate(engine_of(model), requests(DRAWN)[:5])
    texts = {r.prompt: c.tokens for r, (c,) in zip(requests(), expected, strict=False)}
    for recorder in (strict, StrictRerun):
        engine = engine_of(
            model, flawed_proposer(texts) if drafts else None, make_recorder=recorder
        )
        engine.runner.model = forward_model
        outputs.append(generate_outputs(engine))
    assert outputs[0] == outputs[1]
    assert [tokens for tokens, _ in outputs[0]] == [c.tokens for (c,) in expected]
    assert sum(recorder.tape.replays for recorder in recorders) == engine.graphs.replayed > 4
    assert (0 < engine.stats.accepted < engine.stats.drafted) == drafts
    assert engine.graphs.replayed > engine.stats.steps - 4  # all steps but prefill
    assert not [r.tape.syncs for r in recorders if optimized and r.tape.syncs]
    assert len(recorders) == engine.graphs.captured >= 2


@pytest.mark.parametrize("recorder", [StrictTape, CpuGraph])
def test_graphs_share_one_logits_buffer(recorder: type) -> None:
    model = model_of("gqa")
    engine = engine_of(model, make_recorder=recorder)
    engine.runner.model = InferenceOptimizedModel(model)
    generate_outputs(engine)
    graphs = engine.runner.graphs
    assert graphs is not None
    outputs = [graph.outputs for graph in graphs._graphs.values()]
    assert len(outputs) >= 2
    assert len({logits.untyped_storage().data_ptr() for _, logits in outputs}) == 1
    max_rows, vocabulary = graphs.buckets[-1], outputs[0][1].shape[1]
    assert outputs[0][1].untyped_storage().nbytes() == 4 * max_rows * vocabulary
    if recorder is CpuGraph:  # CpuGraph retains the outputs of its operations
        calls = [graph.recorder._calls for graph in graphs._graphs.values()]
        tensors = [x for x in tree_leaves(calls) if isinstance(x, torch.Tensor)]
        tensors = [x for x in tensors if x.shape[-1:] == (vocabulary,) and x.dtype is torch.float32]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == 1


#: (model family, optimized forward, sequence parallel)
SHARDED = (("gqa", True, False), ("hybrid", False, False), ("gqa", True, True))


def replay_on_rank(rank: int, world: int) -> list[tuple[list[list[int]], int, int]]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    outputs = []
    for family, optimized, sequence_parallel in SHARDED:
        with one_thread():
            model = model_of(family, groups, sequence_parallel=sequence_parallel)
            make = StrictRerun if sequence_parallel else lambda: TapeRecorder(OpTape())
            engine = engine_of(
                model, make_recorder=make, token_multiple=world if sequence_parallel else 1
            )
            engine.runner.model = InferenceOptimizedModel(model) if optimized else model
            tokens = [tokens for tokens, _ in generate_outputs(engine, 3)]
        assert engine.graphs is not None
        outputs.append((tokens, engine.graphs.replayed, engine.stats.steps))
    return outputs


def test_graph_replay_on_two_ranks_matches_single_process() -> None:
    ranks = run_ranks(replay_on_rank, 2)
    for n, (family, *_) in enumerate(SHARDED):
        expected = [tokens for tokens, _ in generate_outputs(engine_of(model_of(family)), 3)]
        for rank_outputs in ranks:
            tokens, replayed, steps = rank_outputs[n]
            assert tokens == expected, family
            assert steps > replayed > steps - 4  # all steps but prefill


@pytest.mark.parametrize("recorder", [StrictTape, StrictRerun])
def test_host_read_during_capture_is_detected(recorder: type) -> None:
    with pytest.raises(HostRead):
        generate_outputs(engine_of(model_of("experts"), make_recorder=recorder))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: range(x.sum()),
    ],
)
def test_rerun_refuses_host_reads(read) -> None:
    x = torch.ones(3, dtype=torch.int64)
    with pytest.raises(HostRead):
        StrictRerun().capture(lambda: read(x))
    assert read(x) is not None  # reads are allowed outside a capture


@pytest.mark.parametrize("grows", [False, True])
def test_rerun_refuses_growing_memory(grows: bool) -> None:
    retained: dict[int, torch.Tensor] = {}
    x, recorder = torch.ones(3), StrictRerun()

    def run() -> None:
        retained[len(retained) if grows else 0] = x + 1

    recorder.capture(run)
    with pytest.raises(MemoryGrowth) if grows else contextlib.nullcontext():
        for _ in range(9):
            recorder.replay()
    assert (recorder.replays < 9) == grows


def test_padding_rows_write_no_pages() -> None:
    engine = engine_of(model_of("gqa"), make_recorder=StrictTape, max_num_seqs=7)
    written: set[int] = set()
    schedule = engine.scheduler.schedule

    def recording_schedule(*args, **kwargs):
        plan = schedule(*args, **kwargs)
        written.update(plan.slot_mappings[0].tolist())
        return plan

    engine.scheduler.schedule = recording_schedule
    for pages in engine.cache._pages:
        pages.fill_(7.0)
    generate_outputs(engine, 3)  # in a bucket of 4
    assert engine.graphs.replayed > 0
    for pages in engine.cache._pages:
        slots = pages.flatten(0, 1)
        unwritten = [n for n in range(len(slots)) if n not in written]
        equal = bool((slots[unwritten] == 7.0).all())
        assert equal
        occurs = bool((slots[sorted(written)] == 7.0).any())
        assert not occurs


def test_single_rank_graphs_ignore_the_row_limit() -> None:
    """Steps of many rows read on the host only when ranks share experts."""
    with mock.patch.object(model_runner, "MAX_PADDED_ROWS", 1):
        engine = engine_of(model_of("gqa"), make_recorder=StrictTape)
    outputs = generate_outputs(engine)
    assert outputs == generate_outputs(engine_of(model_of("gqa")))
    assert engine.graphs.replayed > engine.stats.steps - 4  # all steps but prefill


def test_graphs_are_recaptured_after_sleep() -> None:
    engine = engine_of(model_of("hybrid"), make_recorder=StrictTape)
    before = generate_outputs(engine, 2)
    captured = engine.graphs.captured
    engine.sleep()
    engine.wake()
    assert generate_outputs(engine, 2) == before
    assert engine.graphs.captured == 2 * captured


@pytest.mark.parametrize("moved", ["pages", "states"])
def test_graph_with_moved_buffer_is_refused(moved: str) -> None:
    engine = engine_of(model_of("hybrid"), make_recorder=StrictTape)
    generate_outputs(engine, 2)
    graphs = engine.graphs
    assert graphs.compared == graphs.replayed * graphs.buffers > 0
    assert graphs.replayed + graphs.eager == engine.stats.steps
    before = list(engine.cache._pages), dict(engine.cache.states._buffers)
    if moved == "pages":
        engine.cache._pages[-1] = before[0][-1].clone()
    else:
        name, buffer = next(iter(before[1].items()))
        engine.cache.states._buffers[name] = buffer.clone()
    replayed = graphs.replayed
    with pytest.raises(RuntimeError, match=f"1 of {graphs.buffers} buffers"):
        generate_outputs(engine, 2)
    assert graphs.replayed == replayed


def test_bucket_sizes_cover_all_row_counts() -> None:
    assert bucket_sizes(1, 1) == (1,)
    assert bucket_sizes(6, 1) == (1, 2, 4, 6)
    assert bucket_sizes(16, 1) == (1, 2, 4, 8, 16)
    assert bucket_sizes(7, 2) == (2, 4, 8)
    assert bucket_sizes(4, 1, all_sizes=True) == (1, 2, 3, 4)
    assert bucket_sizes(5, 2, all_sizes=True) == (2, 4, 6)


@pytest.mark.parametrize("family", ["gqa", "window and sinks", "latent", "hybrid", "experts"])
def test_cpu_graphs_are_bit_identical_to_eager_steps(family: str) -> None:
    """Attention and experts follow lengths and counts, so they are called at each replay."""
    groups, outputs = ProcessGroupCollection.single(), []
    model = InferenceOptimizedModel(GPTModel(FAMILIES[family], groups, dtype=torch.float32, seed=3))
    for make_recorder in (None, CpuGraph):
        engine = engine_of(model.model, make_recorder=make_recorder)
        engine.runner.model = model
        outputs.append(generate_outputs(engine))
    assert outputs[0] == outputs[1]
    assert engine.graphs is not None
    assert not engine.graphs.refused
    assert engine.graphs.replayed > engine.stats.steps - 4  # all steps but prefill


def test_cpu_graphs_are_recaptured_for_longer_contexts() -> None:
    model, outputs = InferenceOptimizedModel(model_of("gqa")), []
    batch = [replace(requests()[0], prompt=(5, 6, 7), max_new_tokens=40)]
    for make_recorder in (None, CpuGraph):
        with mock.patch.object(decode_graphs, "CPU_CONTEXT", 16):
            engine = engine_of(model.model, make_recorder=make_recorder)
        engine.runner.model = model
        outputs.append([(c.tokens, c.logprobs) for (c,) in generate(engine, batch)])
    assert outputs[0] == outputs[1]
    assert engine.graphs.captured == 3  # for 16, 32 and 64 tokens
    assert engine.graphs.replayed == 39


def test_large_steps_on_a_cpu_are_eager() -> None:
    model = InferenceOptimizedModel(model_of("gqa"))
    engine = engine_of(model.model, make_recorder=CpuGraph, max_num_seqs=20)
    engine.runner.model = model
    batch = [replace(request, max_new_tokens=4 + n) for n, request in enumerate(requests() * 6)][
        :20
    ]
    tokens = [c.tokens for (c,) in generate(engine, batch)]
    assert engine.graphs.eager >= 4  # with 20 down to 17 rows
    assert engine.graphs.replayed > 4
    assert tokens == [c.tokens for (c,) in generate(engine_of(model.model, max_num_seqs=20), batch)]


def test_unrecordable_model_runs_eagerly_and_reports_reason() -> None:
    model = model_of("gqa")  # reads its token ids on a CPU
    engine = engine_of(model, make_recorder=CpuGraph)
    assert generate_outputs(engine) == generate_outputs(engine_of(model))
    assert (engine.graphs.replayed, engine.graphs.eager) == (0, engine.stats.steps)
    assert "steps run eagerly since aten._local_scalar_dense" in str(engine.graphs)


def test_cpu_graphs_use_replaced_weights() -> None:
    """In-place updates reach existing graphs; `weights_replaced` recaptures graphs of copies."""
    for copies in (None, "int8"):
        model = InferenceOptimizedModel(model_of("experts"))
        if copies is not None:
            copy_weights(matrices(model.model), copies)
        engine = engine_of(model.model, make_recorder=CpuGraph)
        engine.runner.model = model
        before, captured = generate_outputs(engine), engine.graphs.captured
        with torch.no_grad():
            for weight in model.model.parameters():
                weight *= 1.3
        if copies is None:
            engine.scheduler.reset_prefix_cache()
        else:
            engine.weights_replaced()
        after = generate_outputs(engine)
        assert after != before
        assert engine.graphs.captured == captured * (1 if copies is None else 2)
        eager = engine_of(model.model)
        eager.runner.model = model
        assert generate_outputs(eager) == after
