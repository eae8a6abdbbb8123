# SPDX-License-Identifier: Apache-2.0
"""The device of the tests that need one."""

from __future__ import annotations

import pytest
import torch

from megatron.core.device import choose_device


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU."""
    return choose_device("cuda")
