# SPDX-License-Identifier: Apache-2.0
"""Options of experiments."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.values import require


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Experiments, available only in a checkout of the repository."""

    experiment: tuple[str, ...] | None = None
    """NAME ...: enable these experiments, folders of experimental/; the README.md of each describes
    what it changes."""
    experiment_option: tuple[str, ...] | None = None
    """NAME.KEY=VALUE ...: options of the experiments in --experiment."""

    def __post_init__(self) -> None:
        names = self.experiment or ()
        for name in names:
            require(
                name.isidentifier(),
                f"--experiment {name!r} is not the name of a folder in experimental/: use one",
            )
        require(
            len(set(names)) == len(names), f"--experiment {' '.join(names)}: list each name once"
        )
        experiment_words = {word for name in names for word in self.option_arguments(name)}
        for word in self.experiment_option or ():
            require(
                word in experiment_words and "=" in word,
                f"--experiment-option {word}: use NAME.KEY=VALUE with a NAME of --experiment",
            )
        keys = [word.partition("=")[0] for word in self.experiment_option or ()]
        for key in dict.fromkeys(keys):
            require(keys.count(key) == 1, f"--experiment-option {key}: give it only once")

    def option_arguments(self, name: str) -> list[str]:
        """Return the NAME.KEY=VALUE arguments of one experiment."""
        return [word for word in self.experiment_option or () if word.startswith(f"{name}.")]
