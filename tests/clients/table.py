# SPDX-License-Identifier: Apache-2.0
"""All rows of the client matrix, and the page docs/clients.md, which lists them.

`python -m tests.clients.table` writes the page.
"""

from __future__ import annotations

from pathlib import Path

from tests.clients import anthropic_rows, body_rows, framework_rows, openai_rows
from tests.clients.matrix import Row

MATRIX: dict[str, tuple[Row, ...]] = {
    "openai": openai_rows.ROWS,
    "anthropic": anthropic_rows.ROWS,
    "LangChain": framework_rows.LANGCHAIN,
    "LiteLLM": framework_rows.LITELLM,
    "Instructor": framework_rows.INSTRUCTOR,
    "Load generators": body_rows.LOAD,
    "Coding agents": body_rows.AGENTS,
}
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
#: Precedes the tables.
MARK = "<!-- The tables are written by python -m tests.clients.table. -->\n"


def render() -> str:
    """Return the text of the page, with its own text before the tables."""
    text = PAGE.read_text().partition(MARK)[0] + MARK
    for name, rows in MATRIX.items():
        text += f"\n## {name}\n\n| idiom | result |\n|---|---|\n"
        for row in rows:
            outcome = "served" if row.refused is None else f"refused: `{row.refused}`"
            text += f"| {row.idiom} | {outcome} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(render())
