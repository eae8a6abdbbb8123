# SPDX-License-Identifier: Apache-2.0
"""Generation with low-bit copies of the weights, against a model that stores the copies' values."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.inference import generate
from megatron.core.models import GPTModel, InferenceOptimizedModel
from megatron.core.models.inference_optimized import matrices
from megatron.core.ops.matmul import low_bit
from megatron.core.ops.matmul.low_bit import CopyDtype, LowBitCopy
from megatron.core.ops.matmul.onednn import agrees
from megatron.core.weight_gather import CopyReport, copy_weights
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_decoded_states import decode_prompts
from tests.unit_tests.core.inference.test_engine import FAMILIES, engine_of, prompts, requests

#: Largest difference of log-probabilities in bf16, whose products are rounded in different orders.
BF16_BOUND = 2e-2
PACKS_BF16 = agrees(32, 32, torch.bfloat16, packed=True)


def model_in_fp32(family: str, groups: ProcessGroupCollection | None = None) -> GPTModel:
    groups = groups or ProcessGroupCollection.single()
    return GPTModel(FAMILIES[family], groups, dtype=torch.float32, seed=3)


def with_copies(model: GPTModel, dtype: CopyDtype) -> tuple[InferenceOptimizedModel, CopyReport]:
    """Copy the matrices of a model; return the model that generates, and the size of the copies."""
    report = copy_weights(matrices(model), dtype)
    return InferenceOptimizedModel(model), report


def store_values_of_copies(model: GPTModel, dtype: CopyDtype) -> None:
    """Write the dequantized values of a model's low-bit copies to its matrices."""
    with torch.no_grad():
        for handle in matrices(model):
            weight = handle.get()
            if (
                handle is not model.embedding.weight
            ):  # a tied embedding is looked up in full precision
                weight.copy_(LowBitCopy(weight, dtype).dequantize(0, len(weight)))


def matmul_in_fp32(copy: LowBitCopy, x: torch.Tensor) -> torch.Tensor:
    """Return the product of a copy without rounding operands and result to bf16."""
    return x.float() @ copy.dequantize(0, copy.rows).t()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("family", "rounds"), [("gqa", True), *((family, False) for family in FAMILIES)]
)
def test_states_match_a_model_that_stores_the_copies_values(
    family: str, dtype: CopyDtype, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, matmul = [], LowBitCopy.matmul if rounds else matmul_in_fp32

    def recording_matmul(copy: LowBitCopy, x: torch.Tensor) -> torch.Tensor:
        products.append(copy)
        return matmul(copy, x)

    monkeypatch.setattr(LowBitCopy, "matmul", recording_matmul)
    model, reference = model_in_fp32(family), model_in_fp32(family)
    store_values_of_copies(reference, dtype)
    assert not products
    engine = engine_of(model, max_num_batched_tokens=500)
    engine.runner.model, _ = with_copies(model, dtype)
    with one_thread():
        completions, states = decode_prompts(engine)
    assert len(products) == len(matrices(model)) * engine.stats.steps
    for prompt, completion, prompt_states in zip(prompts(), completions, states, strict=True):
        with torch.no_grad():
            whole = reference(torch.tensor([[*prompt, *completion.tokens]]))
        # Activations are rounded to 8 bits before each product of the few rows of a step, and
        # these models amplify it.
        expected, bound = whole[len(prompt) - 1 : -1], 0.1 if rounds else 1e-4
        assert_close_by_metric("states", torch.stack(prompt_states), expected, bound=bound)


def test_weight_copies_are_rebuilt_after_weight_update() -> None:
    model = model_in_fp32("gqa")
    engine = engine_of(model)
    engine.runner.model, report = with_copies(model, "int8")
    weight = model.head.weight
    before = weight.copy.dequantize(0, 61)
    with torch.no_grad():
        weight.get().mul_(-2)
    assert torch.equal(weight.copy.dequantize(0, 61), before)
    engine.weights_replaced()
    assert_close_by_metric("copy", weight.copy.dequantize(0, 61), -2 * before, bound=1e-6)
    assert report.matrices == len(matrices(model)) == 9
    assert 0.001 < report.mean_error <= report.worst_error < 0.02


@pytest.mark.skipif(not PACKS_BF16, reason="this CPU or build of torch packs no bf16")
def test_a_model_packs_its_bf16_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit, "matmul_dtype", lambda *_: torch.bfloat16)
    model = model_in_fp32("gqa")
    _, report = with_copies(model, "bf16")
    assert report.packed == report.matrices == 9
    assert "9 packed by oneDNN" in str(report)
    before = model.head.weight.copy.dequantize(0, 61)
    with torch.no_grad():
        model.head.weight.get().mul_(-2)
    copy_weights(matrices(model), "bf16")
    assert torch.equal(model.head.weight.copy.dequantize(0, 61), -2 * before)


def states_on_rank(rank: int, world: int) -> list[torch.Tensor]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    model = model_in_fp32("gqa", groups)
    engine = engine_of(model, max_num_batched_tokens=500)
    engine.runner.model, _ = with_copies(model, "int8")
    with one_thread():
        return [states[0] for states in decode_prompts(engine)[1]]


def test_int8_copies_on_two_ranks_stay_close_to_fp32() -> None:
    model = model_in_fp32("gqa")
    for states in run_ranks(states_on_rank, 2):
        for prompt, state in zip(prompts(), states, strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([prompt]))[-1, 0]
            error = assert_close_by_metric("state", state.view(-1), expected, bound=6e-2)
            assert error > 1e-4  # a smaller error means that no copies were used


def prompt_logprobs_on_rank(rank: int, world: int, *, axis: str) -> tuple[list, list, int]:
    """Return the log-probabilities of the prompts with the stored weights and with bf16 copies, and
    the number of products of copies."""
    grid = RankGrid(world_size=world, **{axis: world})
    groups = ProcessGroupCollection.create(grid, rank=rank)
    model = GPTModel(FAMILIES["gqa"], groups, dtype=torch.bfloat16, seed=3)
    engine, products, matmul = engine_of(model), [], LowBitCopy.matmul

    def recording_matmul(copy: LowBitCopy, x: torch.Tensor) -> torch.Tensor:
        products.append(copy)
        return matmul(copy, x)

    def logprobs() -> list[list[float]]:
        engine.scheduler.reset_prefix_cache()
        return [c.prompt_logprobs for (c,) in generate(engine, requests(prompt_logprobs=True))]

    engine.runner.model = InferenceOptimizedModel(model)
    with one_thread(), mock.patch.object(LowBitCopy, "matmul", recording_matmul):
        stored = logprobs()
        assert not products
        engine.runner.model, report = with_copies(model, "bf16")
        assert report.packed == report.matrices == len(matrices(model)) > 3
        assert report.worst_error == 0
        assert "exact" in str(report)
        return stored, logprobs(), len(products)


@pytest.mark.skipif(not PACKS_BF16, reason="this CPU or build of torch packs no bf16")
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_packed_copies_match_stored_weights_on_two_ranks(axis: str) -> None:
    for stored, copied, num_products in run_ranks(partial(prompt_logprobs_on_rank, axis=axis), 2):
        assert num_products > 20
        for prompt, expected, logprobs in zip(prompts(), stored, copied, strict=True):
            assert len(expected) == len(prompt) - 1
            values = [torch.tensor(entries) for entries in (logprobs, expected)]
            assert_close_by_metric("log-probabilities", *values, bound=BF16_BOUND)


def test_copies_that_save_no_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit, "agrees", lambda *_, **__: False)
    groups = ProcessGroupCollection.single()
    model = GPTModel(FAMILIES["gqa"], groups, dtype=torch.bfloat16, seed=3)
    with pytest.raises(ValueError, match="the weights are bf16 already"):
        copy_weights(matrices(model), "bf16")
