# SPDX-License-Identifier: Apache-2.0
"""The client matrix: what programs write with each client, against the served answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import Clients
from tests.clients.matrix import Row
from tests.clients.table import MATRIX, render

pytestmark = pytest.mark.slow(seconds=60)

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
CASES = [
    pytest.param(row, id=f"{client}-{row.idiom}") for client, rows in MATRIX.items() for row in rows
]


@pytest.mark.parametrize("row", CASES)
def test_idiom_of_a_client(clients: Clients, row: Row) -> None:
    clients.server.model.script(*row.script)
    if row.refused is None:
        assert row.call(clients) == row.output
        return
    with pytest.raises(Exception) as refusal:
        row.call(clients)
    assert "400" in str(refusal.value)
    assert row.refused in str(refusal.value)


def test_page_lists_the_rows() -> None:
    """`python -m tests.clients.table` writes the page."""
    assert PAGE.read_text() == render()
