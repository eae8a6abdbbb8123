# SPDX-License-Identifier: Apache-2.0
"""Decode steps as graphs, held to eager steps; of CUDA graphs a tape stands in."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron.core.cpu_graph import CpuGraph
from megatron.core.inference import decode_graphs
from megatron.core.inference import engine as engine_module
from megatron.core.inference.decode_graphs import bucket_sizes
from megatron.core.inference.engine import Completion, Engine, generate
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
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
from tests.unit_tests.core.inference.test_speculation import half_right


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


@pytest.fixture
def experts_of_a_gpu():
    with products_of_a_gpu():
        yield


def generated(engine: Engine, count: int = 5) -> list[tuple[list[int], list[float]]]:
    found: list[list[Completion]] = generate(engine, requests(DRAWN)[:count])
    return [(c.tokens, c.logprobs) for outputs in found for c in outputs]


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
@pytest.mark.usefixtures("experts_of_a_gpu")
def test_replays_have_the_bits_of_eager_steps(family: str, optimized: bool, drafts: bool) -> None:
    model = model_of(family)
    runs = InferenceOptimizedModel(model) if optimized else model
    made: list[StrictTape] = []

    def strict() -> StrictTape:
        made.append(StrictTape())
        return made[-1]

    found, wanted = [], generate(engine_of(model), requests(DRAWN)[:5])
    right = {r.prompt: c.tokens for r, (c,) in zip(requests(), wanted, strict=False)}
    for recorder in (strict, StrictRerun):
        engine = engine_of(model, half_right(right) if drafts else None, make_recorder=recorder)
        engine.model = runs
        found.append(generated(engine))
    assert found[0] == found[1]
    assert [tokens for tokens, _ in found[0]] == [c.tokens for (c,) in wanted]
    assert sum(recorder.tape.replays for recorder in made) == engine.graphs.replayed > 4
    assert (0 < engine.stats.accepted < engine.stats.drafted) == drafts
    assert engine.graphs.replayed > engine.stats.steps - 4  # all but those of prompts
    assert not [r.tape.syncs for r in made if optimized and r.tape.syncs]
    assert len(made) == engine.graphs.captured >= 2


@pytest.mark.parametrize("recorder", [StrictTape, CpuGraph])
def test_graphs_share_one_buffer_of_logits(recorder: type) -> None:
    model = model_of("gqa")
    engine = engine_of(model, make_recorder=recorder)
    engine.model = InferenceOptimizedModel(model)
    generated(engine)
    graphs = engine._graphs
    assert graphs is not None
    results = [graph.outputs for graph in graphs._graphs.values()]
    assert len(results) >= 2
    assert len({logits.untyped_storage().data_ptr() for _, logits in results}) == 1
    most, vocabulary = graphs.buckets[-1], results[0][1].shape[1]
    assert results[0][1].untyped_storage().nbytes() == 4 * most * vocabulary
    if recorder is CpuGraph:  # which keeps what its operations compute
        calls = [graph.recorder._calls for graph in graphs._graphs.values()]
        kept = [x for x in tree_leaves(calls) if isinstance(x, torch.Tensor)]
        kept = [x for x in kept if x.shape[-1:] == (vocabulary,) and x.dtype is torch.float32]
        assert len({x.untyped_storage().data_ptr() for x in kept}) == 1


#: Family of the ranks' model, whether its forward pass is the optimized one, and whether it is
#: sequence parallel.
SHARDED = (("gqa", True, False), ("hybrid", False, False), ("gqa", True, True))


def replayed_on_a_rank(rank: int, world: int) -> list[tuple[list[list[int]], int, int]]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    found = []
    for family, optimized, sequence in SHARDED:
        with one_thread():
            model = model_of(family, groups, sequence_parallel=sequence)
            make = StrictRerun if sequence else lambda: TapeRecorder(OpTape())
            engine = engine_of(model, make_recorder=make, token_multiple=world if sequence else 1)
            engine.model = InferenceOptimizedModel(model) if optimized else model
            tokens = [tokens for tokens, _ in generated(engine, 3)]
        assert engine.graphs is not None
        found.append((tokens, engine.graphs.replayed, engine.stats.steps))
    return found


def test_graph_replay_on_two_ranks_matches_single_process() -> None:
    ranks = run_ranks(replayed_on_a_rank, 2)
    for n, (family, *_) in enumerate(SHARDED):
        wanted = [tokens for tokens, _ in generated(engine_of(model_of(family)), 3)]
        for found in ranks:
            tokens, replayed, steps = found[n]
            assert tokens == wanted, family
            assert steps > replayed > steps - 4  # all but those of prompts


@pytest.mark.parametrize("recorder", [StrictTape, StrictRerun])
def test_host_read_during_capture_is_detected(recorder: type) -> None:
    with pytest.raises(HostRead):
        generated(engine_of(model_of("experts"), make_recorder=recorder))


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
def test_the_rerun_refuses_every_read(read) -> None:
    x = torch.ones(3, dtype=torch.int64)
    with pytest.raises(HostRead):
        StrictRerun().capture(lambda: read(x))
    assert read(x) is not None  # outside, all is as before


@pytest.mark.parametrize("grows", [False, True])
def test_the_rerun_refuses_memory_that_grows(grows: bool) -> None:
    found: dict[int, torch.Tensor] = {}
    x, recorder = torch.ones(3), StrictRerun()

    def run() -> None:
        found[len(found) if grows else 0] = x + 1

    recorder.capture(run)
    with pytest.raises(MemoryGrowth) if grows else contextlib.nullcontext():
        for _ in range(9):
            recorder.replay()
    assert (recorder.replays < 9) == grows


def test_padding_touches_no_page() -> None:
    engine = engine_of(model_of("gqa"), make_recorder=StrictTape, max_num_seqs=7)
    written: set[int] = set()
    schedule = engine.scheduler.schedule

    def watched(*given, **named):
        plan = schedule(*given, **named)
        written.update(plan.slot_mapping.tolist())
        return plan

    engine.scheduler.schedule = watched
    for pages in engine.cache._pages:
        pages.fill_(7.0)
    generated(engine, 3)  # in a bucket of 4
    assert engine.graphs.replayed > 0
    for pages in engine.cache._pages:
        places = pages.flatten(0, 1)
        rest = [n for n in range(len(places)) if n not in written]
        equal = bool((places[rest] == 7.0).all())
        assert equal
        occurs = bool((places[sorted(written)] == 7.0).any())
        assert not occurs


def test_graphs_of_a_rank_alone_hold_all_its_rows() -> None:
    """Only where experts are shared does a step of many rows read on the host."""
    with mock.patch.object(engine_module, "MAX_PADDED_ROWS", 1):
        engine = engine_of(model_of("gqa"), make_recorder=StrictTape)
    found = generated(engine)
    assert found == generated(engine_of(model_of("gqa")))
    assert engine.graphs.replayed > engine.stats.steps - 4  # all but those of prompts


def test_graphs_are_recorded_again_after_sleep() -> None:
    engine = engine_of(model_of("hybrid"), make_recorder=StrictTape)
    before = generated(engine, 2)
    captured = engine.graphs.captured
    engine.sleep()
    engine.wake()
    assert generated(engine, 2) == before
    assert engine.graphs.captured == 2 * captured


@pytest.mark.parametrize("moved", ["pages", "states"])
def test_a_graph_over_a_buffer_that_moved_is_refused(moved: str) -> None:
    engine = engine_of(model_of("hybrid"), make_recorder=StrictTape)
    generated(engine, 2)
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
        generated(engine, 2)
    assert graphs.replayed == replayed


def test_buckets_hold_every_number_of_rows() -> None:
    assert bucket_sizes(1, 1) == (1,)
    assert bucket_sizes(6, 1) == (1, 2, 4, 6)
    assert bucket_sizes(16, 1) == (1, 2, 4, 8, 16)
    assert bucket_sizes(7, 2) == (2, 4, 8)
    assert bucket_sizes(4, 1, all_sizes=True) == (1, 2, 3, 4)
    assert bucket_sizes(5, 2, all_sizes=True) == (2, 4, 6)


@pytest.mark.parametrize("family", ["gqa", "window and sinks", "latent", "hybrid", "experts"])
def test_graphs_on_a_cpu_have_the_bits_of_eager_steps(family: str) -> None:
    """Attention and experts follow lengths and counts, so they are called at each replay."""
    groups, found = ProcessGroupCollection.single(), []
    model = InferenceOptimizedModel(GPTModel(FAMILIES[family], groups, dtype=torch.float32, seed=3))
    for make_recorder in (None, CpuGraph):
        engine = engine_of(model.model, make_recorder=make_recorder)
        engine.model = model
        found.append(generated(engine))
    assert found[0] == found[1]
    assert engine.graphs is not None
    assert not engine.graphs.refused
    assert engine.graphs.replayed > engine.stats.steps - 4  # all but those of prompts


def test_graphs_on_a_cpu_are_recorded_anew_for_longer_contexts() -> None:
    model, found = InferenceOptimizedModel(model_of("gqa")), []
    asked = [replace(requests()[0], prompt=(5, 6, 7), max_new_tokens=40)]
    for make_recorder in (None, CpuGraph):
        with mock.patch.object(decode_graphs, "CPU_CONTEXT", 16):
            engine = engine_of(model.model, make_recorder=make_recorder)
        engine.model = model
        found.append([(c.tokens, c.logprobs) for (c,) in generate(engine, asked)])
    assert found[0] == found[1]
    assert engine.graphs.captured == 3  # for 16, 32 and 64 tokens
    assert engine.graphs.replayed == 39


def test_large_steps_on_a_cpu_are_eager() -> None:
    model = InferenceOptimizedModel(model_of("gqa"))
    engine = engine_of(model.model, make_recorder=CpuGraph, max_num_seqs=20)
    engine.model = model
    asked = [replace(one, max_new_tokens=4 + n) for n, one in enumerate(requests() * 6)][:20]
    tokens = [c.tokens for (c,) in generate(engine, asked)]
    assert engine.graphs.eager >= 4  # of 20 rows, down to 17
    assert engine.graphs.replayed > 4
    assert tokens == [c.tokens for (c,) in generate(engine_of(model.model, max_num_seqs=20), asked)]


def test_unrecordable_model_runs_eagerly_and_reports_reason() -> None:
    model = model_of("gqa")  # looks at its token ids on a CPU
    engine = engine_of(model, make_recorder=CpuGraph)
    assert generated(engine) == generated(engine_of(model))
    assert (engine.graphs.replayed, engine.graphs.eager) == (0, engine.stats.steps)
    assert "steps run eagerly since aten._local_scalar_dense" in str(engine.graphs)


def test_graphs_on_a_cpu_see_weights_that_were_replaced() -> None:
    """In place at once, by the graphs that there are; of copies, which are other tensors then, by
    others after `weights_replaced`."""
    for copies in (None, "int8"):
        model = InferenceOptimizedModel(model_of("experts"), copies=copies)
        engine = engine_of(model.model, make_recorder=CpuGraph)
        engine.model = model
        before, captured = generated(engine), engine.graphs.captured
        with torch.no_grad():
            for weight in model.model.parameters():
                weight *= 1.3
        if copies is None:
            engine.scheduler.reset_prefix_cache()
        else:
            engine.weights_replaced()
        after = generated(engine)
        assert after != before
        assert engine.graphs.captured == captured * (1 if copies is None else 2)
        eager = engine_of(model.model)
        eager.model = model
        assert generated(eager) == after
