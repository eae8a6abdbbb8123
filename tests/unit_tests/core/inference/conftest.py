# SPDX-License-Identifier: Apache-2.0
"""All tensors are small: one thread is faster than two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.inputs import one_thread


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Run every test of this folder with one thread."""
    with one_thread():
        yield
