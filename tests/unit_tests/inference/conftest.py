# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that tests of several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpt_checkpoint import make_model, save


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one checkpoint, which no test changes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder, make_model(), length=3000)
    return folder
