# SPDX-License-Identifier: Apache-2.0
"""A small pretraining run for tests: its data, its flags, and its ranks.

Ranks come from the forkserver and call the entry point's own `main`, with the variables of torchrun
set as it sets them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch.distributed as dist

from megatron.cli.errors import ExitCode
from megatron.core.datasets import IndexedDatasetWriter
from megatron.core.dist_checkpointing import read_manifest
from megatron.training import pretrain_gpt
from megatron.training.monitoring.metrics import read_metrics
from megatron.training.pretrain_hybrid import PRETRAIN_HYBRID
from tests.support.arguments import last_wins
from tests.support.ranks import DEVICES, Outcome, RankSet, start_ranks

VOCABULARY = 61

#: 2 layers, grouped queries, uneven sizes; 12 steps of 8 samples are between two and three epochs.
FLAGS = """
--num-layers 2 --hidden-size 48 --ffn-hidden-size 64 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.1
--hidden-dropout 0.1 --seq-length 24 --micro-batch-size 2 --global-batch-size 8 --train-iters 12
--lr 5e-3 --lr-warmup-iters 2 --lr-decay-style cosine --eval-interval 6 --eval-iters 2
--split 90,10 --vocab-size 61 --make-vocab-size-divisible-by 4 --log-interval 1 --progress plain
"""


def write_tokens(prefix: Path, *, seed: int = 5, documents: int = 30) -> Path:
    """Write token files in which the previous token mostly determines the next one."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(documents):
            length = int(random.integers(20, 60))
            tokens = [int(random.integers(VOCABULARY))]
            while len(tokens) < length:
                sure = random.random() < 0.9
                tokens.append((tokens[-1] * 7 + 3 if sure else random.integers(60)) % VOCABULARY)
            writer.add_documents(np.array(tokens, dtype=np.int64), np.array([length]))
    return prefix


def flags(prefix: Path, options: str = "", *, without: Collection[str] = ()) -> list[str]:
    """Return the small run's arguments for the data at `prefix`; `options` override them.

    Args:
        without: flags to leave out, with their values.
    """
    words, left_out = [], False
    arguments = [*FLAGS.split(), "--data-path", str(prefix), *options.split()]
    if DEVICES[-1] == "cuda":
        arguments = ["--device", "cuda", *arguments]
    if "--load-hf" not in arguments:
        positions = "rope" if program_of(arguments) is pretrain_gpt.PRETRAIN_GPT else "none"
        arguments = ["--position-embedding-type", positions, *arguments]
    for word in last_wins(arguments):
        left_out = word in without if word.startswith("--") else left_out
        words += [] if left_out else [word]
    if not {"--save", "--metrics-file", "--tensorboard-dir"} & set(words):
        words += ["--metrics-file", str(prefix.with_name("unsaved.jsonl"))]  # not ./runs/...
    return words


def program_of(argv: list[str]) -> pretrain_gpt.Program:
    """Return the entry script for `argv`: a pattern with recurrent or parallel blocks needs
    pretrain_hybrid."""
    flag = "--hybrid-layer-pattern"
    pattern = argv[argv.index(flag) + 1] if flag in argv else ""
    return PRETRAIN_HYBRID if set("GMC(") & set(pattern) else pretrain_gpt.PRETRAIN_GPT


def run_in_process(argv: list[str]) -> int:
    """Run in this process, as a single rank, and return the exit code."""
    return pretrain_gpt.main(argv, {}, program=program_of(argv))


def refused(
    words: Iterable[object], *texts: str, main: Callable[[list[str], dict], int] | None = None
) -> str:
    """Run an entry point that must refuse in one line besides warnings; return the line.

    Args:
        texts: what the line contains.
        main: the entry point; None is the small run.
    """
    out, err = io.StringIO(), io.StringIO()
    argv = [str(word) for word in words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_in_process(argv) if main is None else main(argv, {})
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("WARNING: ")]
    assert code == ExitCode.USER_ERROR, f"exit code {code}: {err.getvalue()}"
    assert len(lines) == 1, err.getvalue()
    assert all(text in lines[0] for text in texts), lines[0]
    return lines[0]


def rank_process(
    rank: int, world: int, port: int, argv: list[str], *, run_id: str | None = None
) -> NoReturn:
    """Run one rank and exit at once with the entry point's code.

    Args:
        run_id: run id of the launcher, if this process is the child of a launcher.
    """
    environment = {} if run_id is None else {"TORCHELASTIC_RUN_ID": run_id}
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    code = pretrain_gpt.main(argv, environment, program=program_of(argv))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launched_rank(rank: int, world: int, port: int, argv: list[str]) -> NoReturn:
    """Run one rank that a launcher of `tests.support.launchers` has started."""
    rank_process(rank, world, port, argv, run_id="test")


@contextlib.contextmanager
def running(
    world: int, argv: list[str], *, process: Callable[..., None] = rank_process
) -> Iterator[RankSet]:
    """Start the run on new ranks; this process serves the store, like torchrun.

    Args:
        process: function that each rank calls, with the arguments of `rank_process`.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start_ranks(process, world, server.port, argv, init=False) as ranks:
        yield ranks
    del server


def run_on(world: int, argv: list[str], *, timeout: float = 100.0) -> list[Outcome]:
    """Run to the end and return every rank's outcome; an unexpected failure shows the logs."""
    if world == 1:
        code = run_in_process(argv)
        assert code == 0
        return [Outcome(0, exit_code=code)]
    return _run_to_end(world, argv, timeout)[0]


def output_of(world: int, argv: list[str], *, timeout: float = 100.0) -> str:
    """Run to the end and return the concatenated logs of the ranks."""
    return _run_to_end(world, argv, timeout)[1]


def _run_to_end(world: int, argv: list[str], timeout: float) -> tuple[list[Outcome], str]:
    with running(world, argv) as ranks:
        outcomes = ranks.outcomes(timeout=timeout)
        logs = "\n".join(f"--- rank {rank}\n{ranks.log(rank)}" for rank in range(world))
    assert all(o.exit_code == 0 for o in outcomes), f"{outcomes}\n{logs}"
    return outcomes, logs


def losses(metrics: Path, kind: str = "train") -> dict[int, float]:
    """Return the losses of a run by iteration."""
    return {e["iteration"]: e["lm_loss"] for e in read_metrics(metrics) if e["kind"] == kind}


def timeless(metrics: Path) -> list[dict]:
    """Return a run's metrics events without timing and memory fields, saves and process ends."""
    speed = ("seconds_per_iteration", "tokens_per_second", "tflops")
    measured = (*speed, "memory_bytes", "peak_memory_bytes")
    events = [event for event in read_metrics(metrics) if event["kind"] not in ("end", "save")]
    return [{k: v for k, v in event.items() if k not in measured} for event in events]


def digests(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of every tensor in a checkpoint, over its chunks in order."""
    tensor_digests = {}
    for name, tensor in read_manifest(checkpoint).tensors.items():
        sha256 = hashlib.sha256()
        for chunk in tensor.chunks:
            with (checkpoint / chunk.file).open("rb") as file:
                file.seek(chunk.begin)
                sha256.update(file.read(chunk.end - chunk.begin))
        tensor_digests[name] = sha256.hexdigest()
    return tensor_digests
