# SPDX-License-Identifier: Apache-2.0
"""Faults planted on purpose, and their effect on a tensor."""

from __future__ import annotations

import pytest
import torch

from tests.support.planting import flip, make_nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flip_changes_one_bit_of_largest_element_in_views_too(dtype):
    whole = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    values, before = whole.transpose(0, 2)[1:], whole.clone()
    flip(values)
    (index,) = torch.nonzero(whole.flatten() != before.flatten()).flatten().tolist()
    old, new = before.flatten()[index], whole.flatten()[index]
    assert old.abs() == before.transpose(0, 2)[1:].abs().max()
    assert 0.5 < float(new / old) < 1.6
    integers = torch.int32 if dtype is torch.float32 else torch.int16
    bits = int(old.view(integers)) ^ int(new.view(integers))
    assert bin(bits).count("1") == 1


def test_make_nan_changes_only_the_largest_element():
    values = torch.randn(3, 4)
    index = int(values.abs().argmax())
    make_nan(values)
    assert torch.nonzero(values.isnan().flatten()).flatten().tolist() == [index]
