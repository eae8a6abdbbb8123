# SPDX-License-Identifier: Apache-2.0
"""`--experiment` loads experiments of the checkout, and explains why it refuses another name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.training.config.resolve import resolve
from megatron.training.experiments import ROOT, check_experiments, load_experiments
from tests.unit_tests.training.small_config import small_config


def test_experiments_of_this_checkout_are_listed():
    config = small_config("--experiment weight_average recurrence_splits")
    assert check_experiments(config.experiments) == []
    assert check_experiments(small_config().experiments) == []


def test_unknown_experiment_is_refused_with_known_names():
    (problem,) = check_experiments(small_config("--experiment weight_averages").experiments)
    for word in ("--experiment weight_averages", "weight_average", "recurrence_splits"):
        assert word in problem


def test_experiments_need_a_checkout(tmp_path):
    (problem,) = check_experiments(
        small_config("--experiment weight_average").experiments, tmp_path
    )
    assert "--experiment weight_average" in problem
    assert "checkout" in problem


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("half_life=8", "use one of half_life_samples"),
        ("half_life_samples=x", "expected a number"),
        ("half_life_samples=-1", "--experiment weight_average: half_life_samples -1.0"),
        ("half_life_samples=0", "--experiment weight_average: half_life_samples 0.0"),
    ],
)
def test_experiment_options_are_validated_like_flags(option, message):
    flags = "--global-batch-size 6 --experiment weight_average --experiment-option weight_average."
    flags += option
    with pytest.raises(ValueError, match=message):
        load_experiments(resolve(small_config(flags), 1))


def test_experiment_is_importable_from_any_working_directory(tmp_path):
    """The process finds the checkout only through the installed packages."""
    code = (
        "from tests.unit_tests.training.small_config import small_config\n"
        "from megatron.training.config.resolve import resolve\n"
        "from megatron.training.experiments import load_experiments\n"
        "import sys\n"
        f"sys.path.remove({str(ROOT)!r})\n"
        "flags = '--global-batch-size 6 --experiment weight_average'\n"
        "(experiment,) = load_experiments(resolve(small_config(flags), 1))\n"
        "assert experiment.hooks is not None and experiment.blocks is None\n"
    )
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
