# SPDX-License-Identifier: Apache-2.0
"""Experiments of a run: `--experiment NAME` loads experimental/NAME/experiment.py of a checkout.

That file defines `experiment(run, options) -> Experiment` and, if it has options, a dataclass
`Options` with a default for each. Wheels do not contain the folder, and no module imports it: it is
looked up next to the folder of this package. This module does not import torch, so that names are
checked before a run starts.
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

#: The root of the checkout, if this file is part of one.
ROOT = Path(__file__).resolve().parents[2]
FOLDER = "experimental"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The changes of an experiment to a run.

    Args:
        blocks: takes the run's backend and returns the backend that the model is built from.
        hooks: takes the model and the train step and returns hooks of the training loop.
    """

    blocks: Callable[[Backend], Backend] | None = None
    hooks: Callable[[GPTModel, TrainStep], TrainingHooks] | None = None


def check_experiments(config: ExperimentConfig, root: Path = ROOT) -> list[str]:
    """Return a message for each experiment in the options that does not exist."""
    folder, problems = root / FOLDER, []
    for name in config.experiment or ():
        if not folder.is_dir():
            problems.append(
                f"--experiment {name}: experiments are in the folder {FOLDER} of a checkout, and "
                f"this installation in {root} has none: start from a checkout, or drop the option"
            )
        elif not (folder / name / "experiment.py").is_file():
            available = sorted(file.parent.name for file in folder.glob("*/experiment.py"))
            problems.append(f"--experiment {name}: use one of {', '.join(available)}")
    return problems


def load_experiments(run: ResolvedRun, root: Path = ROOT) -> list[Experiment]:
    """Return the experiments of a run, in the order of the options.

    Raises:
        ValueError: an experiment does not exist, or an option is unknown or has no effect.
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
    """Import an experiment's entry module from `root`, independent of the working directory."""
    if FOLDER not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(FOLDER, [str(root)])
        assert spec is not None
        sys.modules[FOLDER] = importlib.util.module_from_spec(spec)
    module = importlib.import_module(f"{FOLDER}.{name}.experiment")
    file, expected = Path(str(module.__file__)).resolve(), root / FOLDER / name / "experiment.py"
    if file != expected:
        raise ValueError(
            f"--experiment {name}: {file} was imported instead of {expected}: remove the folder of "
            "the first from PYTHONPATH"
        )
    return module


def _options(name: str, module: ModuleType, option_words: list[str]) -> object:
    """Return the options of an experiment: its defaults updated by `key=value` arguments."""
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
