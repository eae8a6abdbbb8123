# SPDX-License-Identifier: Apache-2.0
"""The token files of small runs."""

from pathlib import Path

import pytest

from tests.functional_tests.small_run import write_tokens


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tokens that the tests of a module only read; return their prefix."""
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")
