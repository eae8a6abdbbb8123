# SPDX-License-Identifier: Apache-2.0
"""Ranks started with different options: one line with the option, the values and the ranks."""

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
from megatron.training.data.data_sets import MAY_DIFFER, read_inputs
from megatron.training.pretrain_gpt import read_run
from tests.functional_tests.small_run import flags, write_tokens


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@functools.cache
def start_facts(prefix: Path, more_flags: str = "", world: int = 2) -> StartFacts:
    run = read_run(flags(prefix, more_flags), Launch(world_size=world))
    return read_inputs(run).start_facts(run)


def compare_starts(facts: Sequence[StartFacts]) -> list[str | None]:
    """Compare start facts in one thread per rank; return each rank's error message or None."""
    store, errors = dist.HashStore(), ["never ended"] * len(facts)

    def compare(rank: int) -> None:
        coordinator = StoreCoordinator(store, rank, len(facts), timeout_seconds=20.0)
        try:
            check_same_start(coordinator, facts[rank])
            errors[rank] = None
        except ValueError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize(
    ("flag", "rank0_value", "rank1_value"),
    [
        # Without the check, training ran to the end with a different value on each rank.
        ("--lr", "0.005", "0.0005"),
        ("--seed", "1234", "7"),
        ("--clip-grad", "1.0", "0.5"),
        ("--weight-decay", "0.01", "0.1"),
        ("--global-batch-size", "8", "16"),
        ("--attention-dropout", "0.1", "0.2"),
        ("--norm-epsilon", "1e-05", "1e-06"),
        ("--lr-decay-iters", "12", "24"),
        # Without the check, these options crashed in a collective.
        ("--num-layers", "2", "4"),
        ("--hidden-size", "48", "64"),
        ("--train-iters", "12", "10"),
        ("--bf16", "false", "true"),
        ("--tensor-model-parallel-size", "1", "2"),
        # Options that name files or folders.
        ("--save", "none", "elsewhere"),
        ("--split", "90,10", "80,20"),
    ],
)
def test_differing_option_is_named_with_both_values(prefix, flag, rank0_value, rank1_value):
    changed_flag = f"{flag}{'' if rank1_value == 'true' else f' {rank1_value}'}"
    base, changed = start_facts(prefix), start_facts(prefix, changed_flag)
    text, other_text = compare_starts([base, changed])
    assert text == other_text
    # Options derived from the differing option are not reported.
    reported = re.findall(r"(--\S+) is (\S+) on rank 0 and (\S+) on rank 1\b", text)
    assert reported == [(flag, rank0_value, rank1_value)], text
    assert "\n" not in text


def test_identically_started_ranks_continue(prefix):
    assert compare_starts([start_facts(prefix)] * 3) == [None] * 3


def test_explicit_default_value_is_no_difference(prefix):
    """The value is derived on rank 0 and explicit on rank 1."""
    same = start_facts(prefix, "--lr-decay-iters 12 --ffn-hidden-size 64 --kv-channels 12")
    assert compare_starts([start_facts(prefix), same]) == [None, None]


def test_ranks_are_listed_for_each_value(prefix):
    base, changed, third = (
        start_facts(prefix, changed_flags)
        for changed_flags in ("", "--lr 0.1", "--lr 0.2 --seed 3")
    )
    (text, *other_texts) = compare_starts([base, changed, changed, base, third])
    assert other_texts == [text] * 4
    assert "--lr is 0.005 on ranks 0, 3 and 0.1 on ranks 1, 2 and 0.2 on rank 4" in text
    assert "--seed is 1234 on ranks 0-3 and 3 on rank 4" in text


def test_data_is_compared_by_content(prefix, tmp_path):
    copied = tmp_path / "copy"
    for ending in (".idx", ".bin"):
        copied.with_suffix(ending).write_bytes(prefix.with_suffix(ending).read_bytes())
    same = start_facts(copied, f"--data-path {copied}")
    assert compare_starts([start_facts(prefix), same]) == [None, None]
    changed = start_facts(write_tokens(tmp_path / "other", seed=6))
    text = compare_starts([start_facts(prefix), changed])[0]
    digests = [
        facts.values["the digest of data file 1"] for facts in (start_facts(prefix), changed)
    ]
    assert f"data file 1 is {digests[0]} on rank 0 and {digests[1]} on rank 1" in text


def test_data_mixture_weights_are_compared(prefix):
    blends = (start_facts(prefix, f"--data-path {a} {prefix} 2 {prefix}") for a in (1, 3))
    text = compare_starts(list(blends))[0]
    assert "1.0 2.0 on rank 0 and 3.0 2.0 on rank 1" in text


def test_tokenizer_is_compared_by_content(prefix):
    text = compare_starts([start_facts(prefix), start_facts(prefix, "--vocab-size 62")])[0]
    assert "--vocab-size is 61 on rank 0 and 62 on rank 1" in text


def test_library_versions_are_compared(prefix, monkeypatch):
    base = start_facts(prefix)
    version = importlib.metadata.version

    def newer(package: str) -> str:
        return "99.0" if package == "torch" else version(package)

    monkeypatch.setattr(rank_agreement, "version", newer)
    text = compare_starts([base, start_facts.__wrapped__(prefix)])[0]
    assert f"torch is {version('torch')} on rank 0 and 99.0 on rank 1" in text
    assert "--" not in text.partition(":")[2]


def test_per_rank_options_may_differ(prefix):
    names = {option.name for option in options(Config)}
    assert set(MAY_DIFFER) <= names
    local = "--tensorboard-dir tb --metrics-file m.jsonl --data-cache-path c --num-workers 0"
    assert compare_starts([start_facts(prefix), start_facts(prefix, local)]) == [None, None]
