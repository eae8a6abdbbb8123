# SPDX-License-Identifier: Apache-2.0
"""What a run on a GPU says of a kernel that its options keep it from."""

import pytest
import torch

from megatron.training.monitoring.kernel_line import kernel_line
from tests.unit_tests.training.small_config import small_config

DROPS = "--attention-dropout 0.1"


@pytest.mark.parametrize(
    ("words", "device", "is_said"),
    [
        (DROPS, "cuda", True),
        (DROPS, "cpu", False),
        ("--attention-dropout 0", "cuda", False),
        (f"{DROPS} --attention-backend reference", "cuda", False),
    ],
)
def test_dropout_keeps_attention_from_its_kernel(words, device, is_said):
    line = kernel_line(small_config(words), torch.device(device))
    assert (line is not None) == is_said
    if line is not None:
        assert "--attention-dropout 0 instead of 0.1" in line
