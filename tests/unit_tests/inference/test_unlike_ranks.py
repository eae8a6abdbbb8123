# SPDX-License-Identifier: Apache-2.0
"""Ranks of generation and of a server that start with different options or files, and refusals by
several ranks after loading."""

from __future__ import annotations

import contextlib
import io
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.cli.flags import parse_command_line
from megatron.cli.rank_agreement import StartFacts, check_same_start
from megatron.cli.schema import options
from megatron.core.dist_checkpointing import StoreCoordinator
from megatron.inference import config as inference_options
from megatron.inference import generate, llm, rank_context, serve
from megatron.inference.bench import BenchConfig
from megatron.inference.config import start_facts
from megatron.inference.generate import GenerateConfig
from megatron.inference.serve import ServeConfig
from tests.support.commands import Main, Outcome, refusal, run_rank
from tests.support.gpt_checkpoint import make_model, save
from tests.support.launchers import serve_store
from tests.support.ranks import start_ranks

TENSOR = ("--tensor-model-parallel-size", "2")


def facts_of(schema: type, *words: str) -> StartFacts:
    line = parse_command_line(schema, ["--load", "x", *words], prog="p", description="d")
    return start_facts(line.config)


def difference(facts_0: StartFacts, facts_1: StartFacts) -> str | None:
    """Let two ranks compare start facts; return rank 0's error, or None if they agree."""
    store, errors = dist.HashStore(), ["", ""]

    def compare(rank: int, facts: StartFacts) -> None:
        try:
            check_same_start(StoreCoordinator(store, rank, 2, timeout_seconds=20.0), facts)
        except ValueError as error:
            errors[rank] = str(error)

    rank_1 = threading.Thread(target=compare, args=(1, facts_1))
    rank_1.start()
    compare(0, facts_0)
    rank_1.join()
    assert errors[0] == errors[1]
    return errors[0] or None


@pytest.mark.parametrize(
    ("schema", "words", "named"),
    [
        (GenerateConfig, ["--seed", "7"], "--seed is 1234 on rank 0 and 7 on rank 1"),
        (GenerateConfig, ["--temperature", "0"], "--temperature is 1.0 on rank 0 and 0.0 on"),
        (ServeConfig, ["--inference-max-tokens", "64"], "is 2048 on rank 0 and 64 on rank 1"),
        (ServeConfig, ["--no-prefix-caching"], "--no-prefix-caching is false on rank 0 and true"),
        (BenchConfig, ["--num-requests", "3"], "--num-requests is 64 on rank 0 and 3 on rank 1"),
        (ServeConfig, ["--tensor-model-parallel-size", "2"], "is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_option_that_differs_between_ranks_is_named(schema, words, named):
    assert named in (difference(facts_of(schema), facts_of(schema, *words)) or "")


def test_options_used_only_by_rank_0_may_differ():
    rank_0_flags = ("--host", "node1", "--port", "1", "--api-key-file", "k")
    assert difference(facts_of(ServeConfig), facts_of(ServeConfig, *rank_0_flags)) is None
    schemas = (GenerateConfig, ServeConfig, BenchConfig)
    names = {option.name for schema in schemas for option in options(schema)}
    assert set(inference_options.MAY_DIFFER) <= names


def command_on_rank(
    rank: int, world: int, main: Main, words: list[list[str]], launcher: dict[str, str]
) -> Outcome:
    """Run a rank of a command with its own words."""
    return run_rank(rank, world, main, words[rank], launcher)


def outcomes_of(command: Callable[..., Outcome], main: Main, *words: list[str]) -> list[Outcome]:
    _store, launcher = serve_store(2)
    with start_ranks(command, 2, main, list(words), launcher, init=False) as ranks:
        return ranks.values(timeout=60.0)


def refusal_line(command: Callable[..., Outcome], main: Main, *words: list[str]) -> str:
    """Run a command that both of two ranks refuse; return the line printed by rank 0."""
    rank_0, rank_1 = outcomes_of(command, main, *words)
    assert (rank_1.code, rank_1.err) == (2, "")
    return refusal(rank_0)


def test_ranks_with_different_options_are_refused(root):
    words = ["--load", str(root), "--device", "cpu", *TENSOR, "--prompt"]
    line = refusal_line(command_on_rank, generate.main, [*words, "a"], [*words, "b", "--seed", "7"])
    assert "prompts is " in line
    assert "--seed is 1234 on rank 0 and 7 on rank 1" in line


@pytest.mark.slow(seconds=15)
def test_server_ranks_with_different_options_are_refused(root):
    words = ["--load", str(root), "--device", "cpu", *TENSOR]
    changed_words = [*words, "--inference-block-size", "32"]
    line = refusal_line(command_on_rank, serve.main, [*words, "--port", "0"], changed_words)
    assert "--inference-block-size is 16 on rank 0 and 32 on rank 1" in line


def generate_on_copy(
    rank: int, world: int, main: Main, words: list[list[str]], launcher: dict[str, str]
) -> Outcome:
    """Run a rank of generation; on rank 1, --load reads another folder."""
    if rank:
        load_folder, local_folder = Path(words[0][1]), Path(words[1][1])
        read = rank_context.open_regular
        rank_context.open_regular = lambda path, **options: read(
            local_folder / path.relative_to(load_folder), **options
        )
    return run_rank(rank, world, main, words[0], launcher)


def test_models_of_ranks_are_compared_by_content(root, tmp_path):
    words = ["--device", "cpu", *TENSOR, "--prompt", "a", "--max-new-tokens", "2"]
    copied, other_model = tmp_path / "copied", tmp_path / "other"
    shutil.copytree(root, copied)
    save(other_model, make_model(2))
    arguments = ["--load", str(root), *words]
    outcomes = outcomes_of(generate_on_copy, generate.main, arguments, ["--load", str(copied)])
    assert [outcome.code for outcome in outcomes] == [0, 0]
    changed_words = ["--load", str(other_model)]
    line = refusal_line(generate_on_copy, generate.main, arguments, changed_words)
    assert "model's files" in line


def generate_slowly_on_rank_0(rank: int, *args) -> tuple[int, str, float]:
    """Return the exit code, stderr, and the time at which rank 0 printed or rank 1 ended."""
    init, printed = llm.LLM.__init__, []

    def slow_init(*args, **kwargs):
        time.sleep(0.0 if rank else 0.5)
        init(*args, **kwargs)

    class Timed(io.StringIO):
        def write(self, text: str) -> int:
            printed.append(time.monotonic())
            return super().write(text)

    llm.LLM.__init__, err = slow_init, Timed()
    _world, words, launcher = args
    with contextlib.redirect_stderr(err):
        code = generate.main(words[rank], {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    return code, err.getvalue(), (time.monotonic() if rank else printed[-1])


def test_rank_1_ends_after_rank_0_printed_a_late_refusal(root):
    """torchrun terminates rank 0 as soon as rank 1 has ended."""
    words = ["--load", str(root), "--device", "cpu", *TENSOR, "--prompt", "a"]
    words += ["--inference-memory-gb", "1e-6"]
    _store, launcher = serve_store(2)
    with start_ranks(generate_slowly_on_rank_0, 2, [words, words], launcher, init=False) as ranks:
        (code_0, line, printed), (code_1, err_1, ended) = ranks.values(timeout=60.0)
    assert (code_0, code_1) == (2, 2)
    assert "give at least" in line
    assert not err_1
    assert printed < ended


@pytest.mark.parametrize("schema", [GenerateConfig, ServeConfig, BenchConfig])
def test_asynchronous_stages_are_refused_before_loading(schema):
    with pytest.raises(ValueError, match=r"--async-scheduling .*--pipeline-model-parallel-size 2"):
        facts_of(schema, "--pipeline-model-parallel-size", "2", "--async-scheduling")
