# SPDX-License-Identifier: Apache-2.0
"""Ranks of generation and of a server that were started with different options or files, and what
several ranks refuse after loading."""

from __future__ import annotations

import contextlib
import io
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.cli.flags import parse_command_line
from megatron.cli.rank_agreement import StartFacts, check_same_start
from megatron.cli.schema import options
from megatron.core.dist_checkpointing import StoreCoordinator
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.inference import checkpoint_model, generate, llm, serve
from megatron.inference import config as inference_options
from megatron.inference.config import BenchConfig, GenerateConfig, ServeConfig, start_facts
from tests.support.launchers import serve_store
from tests.support.ranks import start_ranks
from tests.unit_tests.inference.test_checkpoint_model import CONFIG, TENSOR, make_model, save


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder, make_model())
    return folder


def facts_of(schema: type, *words: str) -> StartFacts:
    line = parse_command_line(schema, ["--load", "x", *words], prog="p", description="d")
    return start_facts(line.config)


def refusal(first: StartFacts, second: StartFacts) -> str | None:
    """Let two ranks compare facts; return the error of rank 0, None for none."""
    store, found = dist.HashStore(), ["", ""]

    def compare(rank: int, facts: StartFacts) -> None:
        try:
            check_same_start(StoreCoordinator(store, rank, 2, timeout_seconds=20.0), facts)
        except ValueError as error:
            found[rank] = str(error)

    other = threading.Thread(target=compare, args=(1, second))
    other.start()
    compare(0, first)
    other.join()
    assert found[0] == found[1]
    return found[0] or None


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
def test_an_option_of_one_rank_is_named(schema, words, named):
    assert named in (refusal(facts_of(schema), facts_of(schema, *words)) or "")


def test_what_rank_0_alone_uses_may_differ():
    own = ("--host", "node1", "--port", "1", "--api-key-file", "k")
    assert refusal(facts_of(ServeConfig), facts_of(ServeConfig, *own)) is None
    schemas = (GenerateConfig, ServeConfig, BenchConfig)
    known = {option.name for schema in schemas for option in options(schema)}
    assert set(inference_options.MAY_DIFFER) <= known


def command_on_a_rank(
    rank: int, world: int, words: list[list[str]], launcher: dict[str, str], *, program: str
) -> tuple[int, str, bool]:
    """Return the exit code, stderr, and whether there was a process group."""
    err = io.StringIO()
    main = {"generate": generate.main, "serve": serve.main}[program]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(words[rank], {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    return code, err.getvalue(), dist.is_initialized()


def on_generate(*args):
    return command_on_a_rank(*args, program="generate")


def on_serve(*args):
    return command_on_a_rank(*args, program="serve")


def refused(command, *words: list[str]) -> str:
    """Run a command on two ranks, which both refuse; return the one line that rank 0 prints."""
    _store, launcher = serve_store(2)
    with start_ranks(command, 2, list(words), launcher, init=False) as ranks:
        (first, line, *_), (second, silence, *_) = outcomes = ranks.values(timeout=60.0)
    assert (first, second) == (2, 2), outcomes
    assert line.count("\n") == 1, line
    assert not silence
    return line


def test_ranks_with_different_options_are_refused(root):
    words = ["--load", str(root), "--device", "cpu", *TENSOR, "--prompt"]
    line = refused(on_generate, [*words, "a"], [*words, "b", "--seed", "7"])
    assert "prompts is " in line
    assert "--seed is 1234 on rank 0 and 7 on rank 1" in line


@pytest.mark.slow(seconds=15)
def test_server_ranks_with_different_options_are_refused(root):
    words = ["--load", str(root), "--device", "cpu", *TENSOR]
    line = refused(on_serve, [*words, "--port", "0"], [*words, "--inference-block-size", "32"])
    assert "--inference-block-size is 16 on rank 0 and 32 on rank 1" in line


def on_another_copy(rank: int, world: int, words: list[list[str]], launcher: dict[str, str]):
    """Be a rank of generation, on whose machine another model stands where --load says."""
    if rank:
        here, there = Path(words[0][1]), Path(words[1][1])
        read = checkpoint_model.open_regular
        checkpoint_model.open_regular = lambda path, **how: read(
            there / path.relative_to(here), **how
        )
    return on_generate(rank, world, [words[0], words[0]], launcher)


def test_a_model_is_compared_by_content(root, tmp_path):
    words = ["--device", "cpu", *TENSOR, "--prompt", "a", "--max-new-tokens", "2"]
    copied, other = tmp_path / "copied", tmp_path / "other"
    shutil.copytree(root, copied)
    save(other, GPTModel(CONFIG, ProcessGroupCollection.single(), seed=2))
    here = ["--load", str(root), *words]
    _store, launcher = serve_store(2)
    with start_ranks(
        on_another_copy, 2, [here, ["--load", str(copied)]], launcher, init=False
    ) as ranks:
        assert [code for code, *_ in ranks.values(timeout=60.0)] == [0, 0]
    assert "model's files" in refused(on_another_copy, here, ["--load", str(other)])


def slow_on_rank_0(rank: int, *args) -> tuple[int, str, float]:
    """Return the exit code, stderr, and when rank 0 printed, or another rank ended."""
    make, printed = llm.LLM.__init__, []

    def make_slowly(*args, **kwargs):
        time.sleep(0.0 if rank else 0.5)
        make(*args, **kwargs)

    class Timed(io.StringIO):
        def write(self, text: str) -> int:
            printed.append(time.monotonic())
            return super().write(text)

    llm.LLM.__init__, err = make_slowly, Timed()
    _world, words, launcher = args
    with contextlib.redirect_stderr(err):
        code = generate.main(words[rank], {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    return code, err.getvalue(), (time.monotonic() if rank else printed[-1])


def test_no_rank_ends_before_a_refusal_after_loading_is_printed(root):
    """torchrun ends rank 0 as soon as another rank has ended."""
    words = ["--load", str(root), "--device", "cpu", *TENSOR, "--prompt", "a"]
    words += ["--inference-memory-gb", "1e-6"]
    _store, launcher = serve_store(2)
    with start_ranks(slow_on_rank_0, 2, [words, words], launcher, init=False) as ranks:
        (first, line, printed), (second, silence, ended) = ranks.values(timeout=60.0)
    assert (first, second) == (2, 2)
    assert "give at least" in line
    assert not silence
    assert printed < ended


@pytest.mark.parametrize("schema", [GenerateConfig, ServeConfig, BenchConfig])
def test_asynchronous_stages_are_refused_before_loading(schema):
    with pytest.raises(ValueError, match=r"--async-scheduling .*--pipeline-model-parallel-size 2"):
        facts_of(schema, "--pipeline-model-parallel-size", "2", "--async-scheduling")
