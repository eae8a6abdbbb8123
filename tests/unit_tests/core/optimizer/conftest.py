# SPDX-License-Identifier: Apache-2.0
"""Small tensors throughout: one thread is quicker than two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.inputs import one_thread


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Keep every test of this folder to one thread."""
    with one_thread():
        yield
