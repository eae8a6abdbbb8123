# SPDX-License-Identifier: Apache-2.0
"""Linear cross entropy and its per-shard softmax against the equation: loss and gradients."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.backend_choice import add_product_
from megatron.core.ops.linear_cross_entropy import (
    chunk_gradient_,
    chunk_statistics,
    cpu,
    linear_cross_entropy,
    naive,
)
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.gpu_agreement import assert_refused, random_tensor, sized, use_launches
from tests.support.launch_kernels import is_product, launched

KERNELS = pytest.mark.gpu
#: Tokens, features and rows of the weight, of which the last ones may be padding.
TOKENS, FEATURES, VOCABULARY = sized((4096, 512, 32000), (11, 7, 23))


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Use blocks so small that a row has several."""
    use_launches(monkeypatch, "linear_cross_entropy", ("STATISTICS", "GRADIENT"), BLOCK=16)


def token_weights(backend):
    """Return factors of the tokens, fp64 for fp64 inputs."""
    dtype = torch.promote_types(backend.dtype, torch.float32)
    return torch.linspace(0, 2, TOKENS, device=backend.device).to(dtype)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("rows", [11, 3])
def test_loss_matches_the_equation(backend, padding, chunk, rows, monkeypatch):
    """The last block of rows is partial; the gradient of a padded row of the weight is zero."""
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", rows * VOCABULARY)
    valid, weights = VOCABULARY - padding, token_weights(backend)
    targets = torch.arange(TOKENS, device=backend.device) * 5 % valid

    def loss(hidden, weight, **options):
        value, nll = linear_cross_entropy(
            hidden,
            weight,
            targets,
            weights.to(torch.promote_types(hidden.dtype, torch.float32)),
            chunk_tokens=chunk and sized(1000, chunk),
            valid_columns=valid,
            **options,
        )
        assert not nll.requires_grad
        return value

    backend.agree(
        loss,
        lambda h, w: naive.linear_cross_entropy(h, w[:valid], targets, weights.double())[0],
        [x * sized(0.05, 1) for x in backend.random((TOKENS, FEATURES), (VOCABULARY, FEATURES))],
    )


def test_loss_without_gradients_of_the_hidden_states():
    hidden, weight = torch.randn(11, 7), torch.randn(23, 7, requires_grad=True)
    targets, weights = torch.arange(11), torch.ones(11)
    with torch.no_grad():
        loss, nll = linear_cross_entropy(hidden, weight, targets, weights)
    expected, expected_nll = naive.linear_cross_entropy(hidden, weight, targets, weights)
    assert not loss.requires_grad
    assert_close_by_metric("nll", nll, expected_nll)
    loss, _ = linear_cross_entropy(hidden, weight, targets, weights)
    (3 * loss).backward()
    assert hidden.grad is None
    assert_close_by_metric("wgrad", weight.grad, torch.autograd.grad(3 * expected, weight)[0])


def test_vocabulary_shards_combine_to_the_equation(backend):
    """Unequal shards with padding, the last one all padding; padding is never read."""
    size, dtype = sized(4000, 4), torch.promote_types(backend.dtype, torch.float32)
    (logits,) = backend.random((TOKENS, 3 * size))
    logits = logits.to(backend.dtype)
    valid = [size, size, size - 2, 0]
    logits[:, sum(valid) :] = torch.nan
    targets = torch.arange(TOKENS, device=backend.device) * 5 % sum(valid)
    weights = token_weights(backend)
    shards = [*logits.split(size, 1), torch.full_like(logits[:, :size], torch.nan)]
    options = [
        {"vocab_start": i * size, "valid_columns": n, "implementation": backend.implementation}
        for i, n in enumerate(valid)
    ]
    statistics = [
        chunk_statistics(shard, targets, **o) for shard, o in zip(shards, options, strict=True)
    ]
    maxima, sums, target_logits = (torch.stack(x) for x in zip(*statistics, strict=True))
    assert maxima.dtype == dtype
    top = maxima.amax(0)
    lse = top + (sums * (maxima - top).exp()).sum(0).log()
    leaf = logits[:, : sum(valid)].double().requires_grad_()
    identity = torch.eye(sum(valid), dtype=torch.float64, device=leaf.device)
    loss, nll = naive.linear_cross_entropy(leaf, identity, targets, weights.double())
    bound = backend.bounds[torch.float32]
    assert_close_by_metric("nll", lse - target_logits.sum(0), nll, bound=bound)
    gradients = [
        chunk_gradient_(shard.clone(), targets, lse, weights, **o)
        for shard, o in zip(shards, options, strict=True)
    ]
    gradient = torch.cat(gradients, -1)
    assert gradient.dtype == backend.dtype
    (expected,) = torch.autograd.grad(loss, leaf)
    bound = max(bound, backend.bounds[backend.dtype])
    assert_close_by_metric("gradient", gradient[:, : sum(valid)], expected, bound=bound)
    assert not gradient[:, sum(valid) :].any()


@KERNELS
def test_loss_has_three_products_per_chunk(device):
    """torch computes the products of logits and both gradients, and nothing between them."""
    tokens, features, vocabulary = sized((512, 256, 1000), (6, 8, 40))
    shapes = (tokens, features), (vocabulary, features)
    hidden, weight = (random_tensor(device, *shape).requires_grad_() for shape in shapes)
    targets = torch.arange(tokens, device=device) % vocabulary
    weights = torch.ones(tokens, device=device)

    def loss():
        options = {"chunk_tokens": tokens // 2, "implementation": "triton"}
        value = linear_cross_entropy(hidden, weight, targets, weights, **options)[0]
        return torch.autograd.grad(value, (hidden, weight))

    launches = launched(loss)
    assert launches.kernels == {"chunk_statistics_kernel": 2, "chunk_gradient_kernel": 2}
    products = {name: n for name, n in launches.device_kernels.items() if is_product(name)}
    # A GPU library may split a product into several kernels; the loss is a dot product.
    count = sum(products.values())
    assert count >= 6 if device.type == "cuda" else count == 7, products


@KERNELS
@pytest.mark.machine
@pytest.mark.parametrize("overwrite", [True, False])
def test_weight_gradients_are_not_rounded_to_bf16(device, overwrite):
    shapes = (512, 4096), (4096, 384)
    left, right = (random_tensor(device, *shape).bfloat16() for shape in shapes)
    total = random_tensor(device, 512, 384)
    expected = left.double() @ right.double() + (0.0 if overwrite else total.double())
    add_product_(total, left, right, overwrite=overwrite)
    assert relative_error(total, expected) < 2e-5, "bf16 would be 4e-3"


BAD = {
    "vocabulary": (
        lambda: chunk_statistics(torch.ones(3, 4), torch.arange(3), vocab_start=0, valid_columns=5),
        r"valid_columns=5 must be in \[0, 4\]",
    ),
    "targets": (
        lambda: linear_cross_entropy(
            torch.ones(3, 4), torch.ones(7, 4), torch.arange(2), torch.ones(3)
        ),
        r"targets \(2,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_errors(name):
    assert_refused(*BAD[name])
