# SPDX-License-Identifier: Apache-2.0
"""The output of `--print-config`, read back, prints the same config, for random options."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron.cli.flags import parse_command_line
from megatron.cli.schema import Option, build, flatten, options
from megatron.cli.yaml_file import write_options
from megatron.training.config import Config
from megatron.training.config.check import check
from megatron.training.config.resolve import resolve
from tests.unit_tests.training.small_config import small_config

SCHEMA = options(Config)
WORLD = 4

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def values(option: Option) -> st.SearchStrategy:
    """Return a strategy for the values of an option, including values its section refuses."""
    if option.choices:
        strategy: st.SearchStrategy = st.sampled_from(option.choices)
    elif option.kind is bool:
        strategy = st.booleans()
    elif option.kind is int:
        strategy = st.integers(0, 9)
    elif option.kind is float:
        strategy = st.sampled_from([0.0, 1e-5, 0.25, 1.0, 1.5, 3.0]) | st.floats(0, 1, width=32)
    else:
        strategy = _TEXTS.filter(lambda text: "://" not in text)
    if option.many:
        strategy = st.lists(strategy, min_size=1, max_size=3).map(tuple)
    return st.none() | strategy if option.optional else strategy


def printed_config(config: Config) -> str:
    """Return the output of `--print-config` for a run."""
    return write_options(flatten(resolve(config, WORLD).config), SCHEMA)


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(SETTINGS, max_examples=30)
@given(data=st.data())
def test_printed_config_is_read_back_unchanged(data, tmp_path_factory):
    check_round_trip(data, tmp_path_factory)


@pytest.mark.slow
@settings(SETTINGS, max_examples=300)
@given(data=st.data())
def test_printed_config_round_trips_for_many_runs(data, tmp_path_factory):
    check_round_trip(data, tmp_path_factory)


def check_round_trip(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Print a run of drawn options, read it, and print it again."""
    start = flatten(small_config())
    names = data.draw(st.lists(st.sampled_from([o.name for o in SCHEMA]), max_size=8, unique=True))
    by_name = {option.name: option for option in SCHEMA}
    drawn = {name: data.draw(values(by_name[name]), label=name) for name in names}
    try:
        config = build(Config, {**start, **drawn})
    except ValueError:
        assume(False)
    assume(not check(config, WORLD))
    text = printed_config(config)
    file = Path(tmp_path_factory.getbasetemp()) / f"run-{os.getpid()}.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    reread = parse_command_line(Config, ["--config", str(file)], prog="p", description="d").config
    assert not check(reread, WORLD)
    assert resolve(reread, WORLD) == resolve(config, WORLD)
    assert printed_config(reread) == text
