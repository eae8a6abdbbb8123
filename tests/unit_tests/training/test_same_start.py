# SPDX-License-Identifier: Apache-2.0
"""Ranks that were not started alike: one line with the option, the values and the ranks."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.cli import rank_agreement
from megatron.cli.launch import Launch
from megatron.cli.rank_agreement import StartFacts, check_same_start
from megatron.cli.schema import options
from megatron.core.dist_checkpointing import StoreCoordinator
from megatron.training.config import Config
from megatron.training.pretrain_gpt import read_run
from megatron.training.run_inputs import MAY_DIFFER, read_inputs
from tests.functional_tests.small_run import flags, write_tokens


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@functools.cache
def facts_of(prefix: Path, more: str = "", world: int = 2) -> StartFacts:
    run = read_run(flags(prefix, more), Launch(world_size=world))
    return read_inputs(run).start_facts(run)


def refusals(facts: Sequence[StartFacts]) -> list[str | None]:
    """Let a thread for each rank compare facts; return the error of each, None for none."""
    store, found = dist.HashStore(), ["never ended"] * len(facts)

    def compare(rank: int) -> None:
        coordinator = StoreCoordinator(store, rank, len(facts), timeout_seconds=20.0)
        try:
            check_same_start(coordinator, facts[rank])
            found[rank] = None
        except ValueError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    ("flag", "here", "there"),
    [
        # These went on to the end, each rank with its own value.
        ("--lr", "0.005", "0.0005"),
        ("--seed", "1234", "7"),
        ("--clip-grad", "1.0", "0.5"),
        ("--weight-decay", "0.01", "0.1"),
        ("--global-batch-size", "8", "16"),
        ("--attention-dropout", "0.1", "0.2"),
        ("--norm-epsilon", "1e-05", "1e-06"),
        ("--lr-decay-iters", "12", "24"),
        # These crashed in a collective.
        ("--num-layers", "2", "4"),
        ("--hidden-size", "48", "64"),
        ("--train-iters", "12", "10"),
        ("--bf16", "false", "true"),
        ("--tensor-model-parallel-size", "1", "2"),
        # And some that name files or folders.
        ("--save", "none", "elsewhere"),
        ("--split", "90,10", "80,20"),
    ],
)
def test_an_option_of_one_rank_is_named_with_both_values(prefix, flag, here, there):
    more = f"{flag}{'' if there == 'true' else f' {there}'}"
    base, other = facts_of(prefix), facts_of(prefix, more)
    first, second = refusals([base, other])
    assert first == second
    # Options derived from this one are not named.
    named = re.findall(r"(--\S+) is (\S+) on rank 0 and (\S+) on rank 1\b", first)
    assert named == [(flag, here, there)], first
    assert "\n" not in first


def test_ranks_that_were_started_alike_go_on(prefix):
    assert refusals([facts_of(prefix)] * 3) == [None] * 3


def test_an_option_with_the_value_that_it_has_anyway_is_the_same(prefix):
    """Derived on rank 0, given on rank 1."""
    same = facts_of(prefix, "--lr-decay-iters 12 --ffn-hidden-size 64 --kv-channels 12")
    assert refusals([facts_of(prefix), same]) == [None, None]


def test_the_ranks_of_each_value_are_named(prefix):
    base, other, third = (facts_of(prefix, more) for more in ("", "--lr 0.1", "--lr 0.2 --seed 3"))
    (text, *others) = refusals([base, other, other, base, third])
    assert others == [text] * 4
    assert "--lr is 0.005 on ranks 0, 3 and 0.1 on ranks 1, 2 and 0.2 on rank 4" in text
    assert "--seed is 1234 on ranks 0-3 and 3 on rank 4" in text


def test_data_is_compared_by_content(prefix, tmp_path):
    copied = tmp_path / "copy"
    for ending in (".idx", ".bin"):
        copied.with_suffix(ending).write_bytes(prefix.with_suffix(ending).read_bytes())
    same = facts_of(copied, f"--data-path {copied}")
    assert refusals([facts_of(prefix), same]) == [None, None]
    other = facts_of(write_tokens(tmp_path / "other", seed=6))
    text = refusals([facts_of(prefix), other])[0]
    digests = [one.values["the digest of data file 1"] for one in (facts_of(prefix), other)]
    assert f"data file 1 is {digests[0]} on rank 0 and {digests[1]} on rank 1" in text


def test_weights_of_the_data_are_compared(prefix):
    blends = (facts_of(prefix, f"--data-path {a} {prefix} 2 {prefix}") for a in (1, 3))
    text = refusals(list(blends))[0]
    assert "1.0 2.0 on rank 0 and 3.0 2.0 on rank 1" in text


def test_the_tokenizer_is_compared_by_content(prefix):
    text = refusals([facts_of(prefix), facts_of(prefix, "--vocab-size 62")])[0]
    assert "--vocab-size is 61 on rank 0 and 62 on rank 1" in text


def test_versions_are_compared(prefix, monkeypatch):
    base = facts_of(prefix)
    version = importlib.metadata.version

    def newer(package: str) -> str:
        return "99.0" if package == "torch" else version(package)

    monkeypatch.setattr(rank_agreement, "version", newer)
    text = refusals([base, facts_of.__wrapped__(prefix)])[0]
    assert f"torch is {version('torch')} on rank 0 and 99.0 on rank 1" in text
    assert "--" not in text.partition(":")[2]


def test_options_that_may_differ_exist_and_go_on(prefix):
    known = {option.name for option in options(Config)}
    assert set(MAY_DIFFER) <= known
    local = "--tensorboard-dir tb --metrics-file m.jsonl --data-cache-path c --num-workers 0"
    assert refusals([facts_of(prefix), facts_of(prefix, local)]) == [None, None]
