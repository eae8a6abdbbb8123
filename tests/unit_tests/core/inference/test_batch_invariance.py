# SPDX-License-Identifier: Apache-2.0
"""Batch invariance: equal bits alone, in a batch, in chunks, after a prefix hit, in training."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.backend import LOCAL, with_batch_invariance
from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference import (
    Completion,
    Completions,
    Engine,
    EngineConfig,
    EngineRequest,
    SamplingParams,
    generate,
)
from megatron.core.models import GPTModel
from megatron.core.models.inference_optimized import matrices
from megatron.core.ops.matmul import batch_invariant
from megatron.core.ops.matmul.batch_invariant import (
    MAX_ROWS,
    TILE_ROWS,
    PackedMatrix,
    check_tile_invariance,
)
from megatron.core.transformer import RopeConfig
from megatron.core.weight_gather import copy_weights
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator
from tests.unit_tests.core.inference.test_engine import FAMILIES, VOCABULARY

NEW = 5
SAMPLING = SamplingParams(temperature=1.1, seed=5)


#: Whether this machine multiplies 16 features by packed matrices; otherwise it uses tiles.
PACKS = batch_invariant.min_invariant_rows((16, 16)) is not None


@functools.cache
def model_of(family: str, dtype: torch.dtype) -> GPTModel:
    """Return a model of a dtype; in int8 an fp32 model that multiplies by int8 copies."""
    model = GPTModel(
        FAMILIES[family],
        ProcessGroupCollection.single(),
        seed=3,
        dtype=torch.float32 if dtype is torch.int8 else dtype,
        backend=with_batch_invariance(LOCAL),
    )
    if dtype is torch.int8:
        copy_weights(matrices(model), "int8")
    return model


def request(number: int, length: int, *, prefix: tuple[int, ...] = ()) -> EngineRequest:
    ids = torch.randint(0, VOCABULARY, (length,), generator=generator(7, number)).tolist()
    return EngineRequest(
        prompt=(*prefix, *ids[len(prefix) :]),
        max_new_tokens=NEW,
        sampling=SAMPLING,
        sequence=number,
        prompt_logprobs=number == 0,
    )


#: The request under test: two tiles of keys, the last one partly filled.
TARGET = request(0, 75)


def neighbour_requests() -> list[EngineRequest]:
    return [request(n, 3 + 5 * (n % 5)) for n in range(1, 16)]


def engine_of(model: GPTModel, **config) -> Engine:
    return Engine(model, EngineConfig(**{"num_blocks": 200, "max_num_seqs": 16} | config))


def bits(completion: Completion) -> tuple:
    """Return all values that must be equal."""
    return completion.tokens, completion.logprobs, completion.prompt_logprobs


def generate_alone(model: GPTModel, target: EngineRequest = TARGET, **config) -> Completion:
    return generate(engine_of(model, **config), [target])[0][0]


CASES = [(family, torch.float32) for family in FAMILIES]
CASES += [("gqa", torch.bfloat16)]
CASES += [pytest.param(f, torch.bfloat16, marks=pytest.mark.slow) for f in ("latent", "hybrid")]


@pytest.mark.parametrize(("family", "dtype"), [*CASES, ("gqa", torch.int8)], ids=str)
def test_request_bits_do_not_depend_on_the_batch(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    expected = generate_alone(model)
    assert bits(generate_alone(model, max_num_batched_tokens=7)) == bits(expected)
    # A request with prompt log-probabilities does not use the prefix cache.
    target = replace(TARGET, prompt_logprobs=False)
    engine = engine_of(model, max_num_batched_tokens=100)
    for queued in (target, *neighbour_requests()):
        engine.add(queued)
    outputs = Completions()
    max_running = 0
    while engine.unfinished:
        outputs.add(engine.step())
        max_running = max(max_running, len(engine.scheduler.running))
        output = outputs.get((0, 0))
        if output and len(output.tokens) == 2 and not engine.stats.preempted:
            engine.pause(keep_cache=False)
            engine.resume()
    assert engine.stats.preempted > 0
    assert max_running > 8
    from_cache = generate(engine, [target])[0][0]
    assert engine.stats.hit > 0
    for got in (outputs[0, 0], from_cache):
        assert (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_training_forward_computes_the_same_bits(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    completion = generate_alone(model)
    ids = torch.tensor([*TARGET.prompt, *completion.tokens])
    neighbour = torch.randint(0, VOCABULARY, ids.shape, generator=generator(8))
    with torch.set_grad_enabled(family != "hybrid"):
        logits = model.full_logits(torch.stack([neighbour, ids]))[:, 1]
    trained = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].tolist()
    assert trained == [*completion.prompt_logprobs, *completion.logprobs]


@pytest.mark.parametrize(
    "family", ["gqa", *(pytest.param(f, marks=pytest.mark.slow) for f in ("experts", "hybrid"))]
)
def test_two_threads_compute_the_same_bits(family: str) -> None:
    model = model_of(family, torch.float32)
    expected = bits(generate_alone(model))
    torch.set_num_threads(2)
    assert bits(generate_alone(model)) == expected


def test_gradients_match_the_default_backend() -> None:
    tokens = torch.tensor([TARGET.prompt[:70]])
    gradients = []
    # Queries that are scaled by position have sharp softmaxes, which amplify rounding.
    config = replace(FAMILIES["latent"], rope=RopeConfig(base=200.0))
    for backend in (LOCAL, with_batch_invariance(LOCAL)):
        model = GPTModel(config, ProcessGroupCollection.single(), seed=3, backend=backend)
        model.logits(tokens).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_all_close(gradients[1], gradients[0])


def test_rows_of_several_documents_are_refused() -> None:
    tokens = torch.tensor([TARGET.prompt[:8]])
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    layout = SequenceLayout.of_rows(8, document_ids=ids)
    for family in ("gqa", "hybrid"):
        with torch.no_grad(), pytest.raises(ValueError, match="one document"):
            model_of(family, torch.float32)(tokens, layout=layout)


def test_position_dependent_matmul_is_refused(monkeypatch) -> None:
    matrix, mm = torch.randn(5, 8, generator=generator(9)), torch.Tensor.mm
    check_tile_invariance([matrix], torch.float32)
    noise = torch.arange(TILE_ROWS)[:, None] / 7
    monkeypatch.setattr(torch.Tensor, "mm", lambda x, weight: mm(x, weight) + noise)
    with pytest.raises(ValueError, match=r"matrix \[5, 8\]"):
        check_tile_invariance([matrix], torch.float32)


@pytest.mark.skipif(not PACKS, reason="this machine has no packed product of equal bits")
@pytest.mark.parametrize("features", [40, 1500])
def test_packed_product_bits_do_not_depend_on_row_count(features: int) -> None:
    weight = torch.randn(48, features, generator=generator(10))
    x = torch.randn(MAX_ROWS + 1, features, generator=generator(11))
    min_rows, matrix = batch_invariant.min_invariant_rows((48, features)), PackedMatrix(weight)
    if min_rows is None:
        pytest.skip("this machine multiplies so many features in tiles")
    expected = matrix.linear(x, min_rows)
    assert_all_close({"y": expected}, {"y": x @ weight.t()})
    for rows in range(1, MAX_ROWS + 2):
        assert torch.equal(matrix.linear(x[-rows:], min_rows), expected[-rows:])


@pytest.mark.skipif(not PACKS, reason="this machine has no packed product of equal bits")
def test_packed_matrices_are_rebuilt_after_weight_changes() -> None:
    model = GPTModel(
        FAMILIES["gqa"],
        ProcessGroupCollection.single(),
        seed=3,
        backend=with_batch_invariance(LOCAL),
    )
    handle = model.decoder.blocks[0].mixer.qkv.weight
    x = torch.randn(3, handle.shape[1], generator=generator(12))
    with torch.no_grad():
        before, packed = handle.linear(x), handle.packed()
        assert handle.packed() is packed  # cached
        handle.param.mul_(2)
        assert torch.equal(handle.linear(x), 2 * before)
        handle.param.data.mul_(2)  # does not change the tensor's version
        model.weights_replaced()
        assert torch.equal(handle.linear(x), 4 * before)


@pytest.mark.parametrize("cause", ["no operator", "depends on the row count"])
def test_tiles_replace_variant_packed_products(cause: str, monkeypatch) -> None:
    batch_invariant._min_invariant_rows.cache_clear()
    if cause == "no operator":
        monkeypatch.setattr(batch_invariant, "is_available", lambda: False)
    else:
        multiply = torch.nn.functional.linear
        monkeypatch.setattr(batch_invariant, "pack_weight", lambda weight: weight)
        monkeypatch.setattr(
            batch_invariant, "onednn_linear", lambda x, packed: multiply(x, packed) + len(x)
        )
    try:
        model = model_of("gqa", torch.float32)
        assert model.decoder.blocks[0].mixer.qkv.weight.min_invariant_rows() is None
        assert bits(generate_alone(model, max_num_batched_tokens=7)) == bits(generate_alone(model))
    finally:
        batch_invariant._min_invariant_rows.cache_clear()
