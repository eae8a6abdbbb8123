# SPDX-License-Identifier: Apache-2.0
"""The dtype of CPU matmuls in every op: measured, or chosen by the caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core import ProcessGroupCollection
from megatron.core.backend import LOCAL, with_cpu_dtype
from megatron.core.distributed import DataParallel
from megatron.core.inference import EngineConfig
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import EngineRequest
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ops import backend_choice
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "linear")


@pytest.fixture(autouse=True)
def clear_measurements() -> Iterator[None]:
    """Clear cached measurements before and after each test."""
    backend_choice.cpu_bf16_speedup.cache_clear()
    backend_choice.measured_matmul_dtype.cache_clear()
    yield
    backend_choice.cpu_bf16_speedup.cache_clear()
    backend_choice.measured_matmul_dtype.cache_clear()


@pytest.mark.parametrize(("speedup", "expected"), [(3.0, BF16), (1.1, FP32), (0.4, FP32)])
def test_bf16_is_used_only_if_clearly_faster(speedup, expected, monkeypatch):
    monkeypatch.setattr(backend_choice, "cpu_bf16_speedup", lambda: speedup)
    assert backend_choice.matmul_dtype(torch.ones(2, dtype=BF16)) is expected
    assert backend_choice.matmul_dtype(torch.ones(2, dtype=FP16)) is FP32
    for dtype in (FP32, torch.float64):
        assert backend_choice.matmul_dtype(torch.ones(2, dtype=dtype), BF16) is dtype


def test_explicit_dtype_needs_no_measurement(monkeypatch):
    def measured() -> float:
        raise AssertionError("measured")

    monkeypatch.setattr(backend_choice, "cpu_bf16_speedup", measured)
    for dtype in (BF16, FP32):
        assert backend_choice.matmul_dtype(torch.ones(2, dtype=BF16), dtype) is dtype


def test_measurement_restores_the_number_of_threads():
    before = torch.get_num_threads()
    assert 0.01 < backend_choice.cpu_bf16_speedup() < 100
    assert torch.get_num_threads() == before


class CountProducts(TorchDispatchMode):
    """Count matrix products by operation and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count a product and run it."""
        name = func.overloadpacket.__name__
        if name in PRODUCTS or "attention" in name:
            dtypes = {x.dtype for x in args if isinstance(x, torch.Tensor) and x.ndim != 3}
            kind = "attention" if "attention" in name else "product"
            assert len(dtypes) == 1, (name, dtypes)
            self.counts[kind, *dtypes] += 1
        return func(*args, **(kwargs or {}))


def model(dtype: torch.dtype | None) -> GPTModel:
    """Return a bf16 model with dense and expert layers that multiplies in `dtype`."""
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        vocab_size=40,
        attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=8),
        mlp=MLPConfig(ffn_hidden_size=48),
        norm=NormConfig(),
        moe=MoEConfig(num_experts=4, ffn_hidden_size=16, router=RouterConfig(topk=2)),
        ffn_pattern="-E",
    )
    backend = with_cpu_dtype(LOCAL, dtype)
    return GPTModel(config, ProcessGroupCollection.single(), dtype=BF16, backend=backend)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_matmul_of_a_model_uses_the_chosen_dtype(dtype):
    """Forward and backward, including experts, the head and attention."""
    gpt = model(dtype)
    engine = DataParallel(gpt.store, gpt.groups)
    tokens = torch.arange(24).view(2, 12)
    engine.begin_step()
    with CountProducts() as products:
        loss, _ = gpt.loss(tokens, tokens, torch.full((2, 12), 1 / 24))
        engine.backward(loss, last=True)
    # 2 layers of attention; backward of so few tokens is in fp32. A router has 3 products in fp32.
    forward = Counter({("attention", dtype): 2}) + Counter({("attention", FP32): 2})
    dense = 3 * (2 * 2 + 2 + 1)
    experts = products.counts["product", dtype] - dense - (3 if dtype is FP32 else 0)
    assert experts % 3 == 0
    assert 3 * 2 <= experts <= 3 * 2 * 4
    routers = Counter({("product", FP32): 3})
    assert products.counts == forward + Counter({("product", dtype): dense + experts}) + routers


class RecordBatchedProducts(TorchDispatchMode):
    """Record the dtypes of batched matrix products and of fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record the dtype of the operands and run the operation."""
        name = func.overloadpacket.__name__
        if name in ("bmm", "baddbmm") or "attention" in name:
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_decode_attends_in_the_chosen_dtype(dtype, num_sequences):
    engine = Engine(model(dtype), EngineConfig(num_blocks=4, max_num_seqs=2))
    for start in range(num_sequences):
        engine.add(EngineRequest(prompt=(start, 2, 3), max_new_tokens=4))
    engine.step()  # prefill
    with RecordBatchedProducts() as products:
        engine.step()
    assert products.dtypes == {dtype}
