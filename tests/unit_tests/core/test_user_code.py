# SPDX-License-Identifier: Apache-2.0
"""User code around core: an error names the fix for slightly wrong data sets, token weights and
settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.datasets import GPTBatches
from megatron.core.datasets.token_rows import SampleRows
from megatron.core.distributed import DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.core.weight_gather import Storage
from megatron.core.weight_sharding import STRATEGIES

CONFIG = GPTConfig(
    num_layers=1,
    hidden_size=8,
    vocab_size=16,
    attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=4),
    mlp=MLPConfig(ffn_hidden_size=12),
)


class UserDataset:
    """A user's data set whose `read` returns `make_rows(number of samples)`."""

    def __init__(self, make_rows) -> None:
        self.make_rows = make_rows

    def __len__(self) -> int:
        return 6

    def read(self, indices: np.ndarray) -> Any:
        return self.make_rows(len(indices))


def tokens_of(count: int, *, dtype: type = np.int64) -> np.ndarray:
    return np.ones((count, 5), dtype=dtype)


def rows_with(mask: np.ndarray, count: int) -> SampleRows:
    return SampleRows(tokens=tokens_of(count), loss_mask=mask)


def rows_with_changes(count: int, **changes: Any) -> SampleRows:
    """Return valid rows with some fields replaced."""
    return replace(rows_with(np.ones((count, 4), np.float32), count), **changes)


def test_user_dataset_is_read() -> None:
    dataset = UserDataset(lambda n: rows_with(np.full((n, 4), 0.5, np.float32), n))
    batch = next(GPTBatches(dataset, micro_batch_size=2))
    assert batch.loss_mask.tolist() == [[0.5] * 4] * 2
    assert batch.labels.shape == (2, 4)


@pytest.mark.parametrize(
    ("make_rows", "phrases"),
    [
        (lambda n: tokens_of(n), ("ndarray", "SampleRows(", "loss_mask")),
        (lambda n: {"tokens": tokens_of(n)}, ("dict", "SampleRows(", "loss_mask")),
        (
            lambda n: rows_with(np.ones((n, 5), np.float32), n),
            ("loss_mask float32 [2, 5]", "float32 [2, 4]"),
        ),
        (
            lambda n: rows_with(np.ones(4, np.float32), n),
            ("loss_mask float32 [4]", "float32 [2, 4]"),
        ),
        (lambda n: rows_with(np.ones((n, 4), bool), n), ("loss_mask bool", "float32 [2, 4]")),
        (
            lambda n: SampleRows(
                tokens=tokens_of(n, dtype=np.int32), loss_mask=np.ones((n, 4), np.float32)
            ),
            ("tokens int32 [2, 5]", "int64 [2, s + 1]"),
        ),
        (
            lambda n: rows_with(np.ones((n, 4), np.float32), n + 1),
            ("tokens int64 [3, 5]", "int64 [2, s + 1]"),
        ),
        (
            lambda n: replace(
                rows_with(np.ones((n, 4), np.float32), n), padding=np.zeros((n, 5), bool)
            ),
            ("padding bool [2, 5]", "bool [2, 4]"),
        ),
        (
            lambda n: replace(rows_with(np.ones((n, 4), np.float32), n), padding=np.zeros((n, 4))),
            ("padding float64 [2, 4]", "bool [2, 4]"),
        ),
        (
            lambda n: rows_with_changes(n, positions=np.zeros((n, 4), np.int32)),
            ("positions int32", "int64"),
        ),
        (
            lambda n: rows_with_changes(n, document_ids=np.zeros((n, 5), np.int32)),
            ("[2, 5]", "int32 [2, 4]"),
        ),
        (
            lambda n: rows_with_changes(n, document_ids=np.array([[1, 1, 0, 0]] * n, np.int32)),
            ("document_ids",),
        ),
        (
            lambda n: rows_with_changes(n, document_ids=np.array([[1, 1, 2, 2]] * n, np.int32)),
            ("document_ids",),
        ),
        (
            lambda n: rows_with_changes(n, padding=np.ones((n, 4), bool)),
            ("padding", "loss_mask must be 0"),
        ),
        (
            lambda n: rows_with_changes(n, loss_mask=None),
            ("loss_mask of type NoneType", "numpy array"),
        ),
        (
            lambda n: rows_with_changes(n, loss_mask=torch.ones(n, 4)),
            ("type Tensor", "numpy array"),
        ),
        (
            lambda n: rows_with_changes(n, tokens=[[1] * 5] * n),
            ("tokens of type list", "numpy array"),
        ),
    ],
)
def test_invalid_rows_error_names_the_expected_arrays(make_rows, phrases: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"UserDataset\.read\(\)") as error:
        next(GPTBatches(UserDataset(make_rows), micro_batch_size=2))
    assert not [phrase for phrase in phrases if phrase not in str(error.value)]


def test_dataset_without_read_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"read\(indices\).*SampleRows"):
        GPTBatches([tokens_of(1)] * 6, micro_batch_size=2)  # type: ignore[arg-type]


def test_token_weights_must_be_floating_point() -> None:
    model = GPTModel(CONFIG, ProcessGroupCollection.single(), seed=1)
    inputs = torch.arange(8).view(2, 4)
    mask = torch.tensor([[True, False, True, True], [False, True, True, False]])
    for weights in (mask, mask.long()):
        with pytest.raises(ValueError, match=rf"{weights.dtype}.*mask\.float\(\)"):
            model.loss(inputs, inputs, weights)
    loss, per_token = model.loss(inputs, inputs, mask.float() / mask.sum())
    assert loss.item() == pytest.approx(per_token[mask].double().mean().item(), rel=1e-6)
    for dtype in (torch.float64, torch.bfloat16):
        loss_sum, _ = model.loss(inputs, inputs, mask.to(dtype))
        assert loss_sum.item() == pytest.approx(per_token[mask].double().sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("config", "field", "values"),
    [
        (DataParallelConfig, "strategy", STRATEGIES),
        (DataParallelConfig, "outer", ("no_shard", "optim")),
        (DataParallelConfig, "granularity", ("unit", "weight")),
        (DataParallelConfig, "gtp_reduce_scatter_per", ("microbatch", "step")),
        (DataParallelConfig, "gather_format", ("bf16", "fp8", "mxfp8", "nvfp4")),
        (Storage, "strategy", STRATEGIES),
        (OptimizerConfig, "kind", ("adam", "sgd", "muon")),
    ],
)
def test_choices_are_literal_types_and_are_checked(config: type, field: str, values) -> None:
    assert get_args(get_type_hints(config)[field]) == values
    with pytest.raises(ValueError, match="zero-9"):
        config(**{field: "zero-9"})
