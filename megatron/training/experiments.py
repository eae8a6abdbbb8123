# SPDX-License-Identifier: Apache-2.0
"""Experiments in a run: `--experiment NAME` loads experimental/NAME/experiment.py of a checkout.

That file defines `experiment(run, options) -> Experiment` and, if it has options, a dataclass
`Options` with a default for each. No wheel has the folder, and none imports it: it is found beside
the folder of this package. Nothing here imports torch, so names are checked before a run starts.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megatron.cli.schema import options as schema_options

if TYPE_CHECKING:
    from megatron.core.backend import Backend
    from megatron.core.models.gpt import GPTModel
    from megatron.training.config import ExperimentConfig
    from megatron.training.config.resolve import ResolvedRun
    from megatron.training.hooks import TrainingHooks
    from megatron.training.step import TrainStep

#: The root of the checkout, where this file is part of one.
ROOT = Path(__file__).resolve().parents[2]
FOLDER = "experimental"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What an experiment changes in a run.

    Args:
        blocks: given the backend of the run, returns the one that the model is built from.
        hooks: given the model and what takes its steps, returns hooks for the training loop.
    """

    blocks: Callable[[Backend], Backend] | None = None
    hooks: Callable[[GPTModel, TrainStep], TrainingHooks] | None = None


def check_experiments(config: ExperimentConfig, root: Path = ROOT) -> list[str]:
    """List what is wrong with the experiments that options name: each must be there."""
    folder, problems = root / FOLDER, []
    for name in config.experiment or ():
        if not folder.is_dir():
            problems.append(
                f"--experiment {name}: experiments are in the folder {FOLDER} of a checkout, and "
                f"this installation in {root} has none: start from a checkout, or drop it"
            )
        elif not (folder / name / "experiment.py").is_file():
            available = sorted(file.parent.name for file in folder.glob("*/experiment.py"))
            problems.append(f"--experiment {name}: use one of {', '.join(available)}")
    return problems


def load_experiments(run: ResolvedRun, root: Path = ROOT) -> list[Experiment]:
    """Return the experiments of a run in the order in which the options name them.

    Raises:
        ValueError: one is not there, or an option is not one of its options or has no effect.
    """
    chosen = run.config.experiments
    if problems := check_experiments(chosen, root):
        raise ValueError("; ".join(problems))
    experiments = []
    for name in chosen.experiment or ():
        module = _module(name, root)
        option_words = [word.partition(".")[2] for word in chosen.option_arguments(name)]
        experiments.append(module.experiment(run, _options(name, module, option_words)))
    return experiments


def _module(name: str, root: Path) -> ModuleType:
    """Import the entry of an experiment out of `root`, wherever the run was started."""
    if FOLDER not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(FOLDER, [str(root)])
        assert spec is not None
        sys.modules[FOLDER] = importlib.util.module_from_spec(spec)
    module = importlib.import_module(f"{FOLDER}.{name}.experiment")
    file, expected = Path(str(module.__file__)).resolve(), root / FOLDER / name / "experiment.py"
    if file != expected:
        raise ValueError(
            f"--experiment {name}: {file} was imported instead of {expected}: take the folder of "
            "the first out of PYTHONPATH"
        )
    return module


def _options(name: str, module: ModuleType, option_words: list[str]) -> object:
    """Return the options of an experiment: its defaults and those given, as `key=value`."""
    schema = vars(module).get("Options")
    option_by_field = (
        {} if schema is None else {option.field: option for option in schema_options(schema)}
    )
    values = {}
    for word in option_words:
        key, _, text = word.partition("=")
        where = f"--experiment-option {name}.{key}"
        if key not in option_by_field:
            raise ValueError(
                f"{where}: use one of {', '.join(option_by_field) or 'none, it has no options'}"
            )
        values[key] = option_by_field[key].parse([text], where)
    return None if schema is None else schema(**values)
