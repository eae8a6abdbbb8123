# SPDX-License-Identifier: Apache-2.0
"""The complete workflow on one machine: text, tokenizer, token files, training, generation.

Training runs on two ranks. Every stage writes its result to one folder; a second call reuses
finished results and continues with the remaining stages.

The text is part of every Python installation: the language reference and the sources of the
standard library, about 32 MB if the library's own tests are installed, 12 MB otherwise. Documents
are shuffled in an order that depends only on the Python version, so that a validation split taken
from the end resembles the rest.
"""

from __future__ import annotations

import io
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cli.errors import ExitCode, RunStopped, run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.standard_streams import run_command
from megatron.core.untrusted_files import (
    MAX_JSON_BYTES,
    atomic_write,
    open_regular,
    read_json,
    read_text,
    replace_file,
)

# Installed next to the standard library, but not part of it.
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}
# Contains the topics, which are separate documents.
_TOPICS_SOURCE = Path("pydoc_data", "topics.py")


@dataclass(frozen=True, kw_only=True)
class CorpusStats:
    """Statistics of a corpus.

    Args:
        documents: number of topics and files.
        text_bytes: size of all documents in UTF-8.
        topics: documents of the language reference.
        unreadable_files: sources that are deliberately invalid text (tests of the library's
            parser).
        duplicates: files that are empty or equal to an earlier document.
    """

    documents: int
    text_bytes: int
    topics: int
    unreadable_files: int
    duplicates: int


def standard_library() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _sources(folder: Path) -> Iterator[str | None]:
    """Yield the text of each source file in path order; None for a file that is not valid text."""
    paths = [
        path.relative_to(folder)
        for path in folder.rglob("*.py")
        if not _FOREIGN & set(path.relative_to(folder).parts)
    ]
    for path in sorted(paths, key=lambda path: path.parts):
        if path == _TOPICS_SOURCE:
            continue
        try:
            with open_regular(folder / path, follow_links=True) as stream:
                encoding, _ = tokenize.detect_encoding(stream.readline)
                stream.seek(0)
                with io.TextIOWrapper(stream, encoding) as lines:
                    text = lines.read()
                text.encode()
        except (SyntaxError, UnicodeError, OSError):
            yield None
        else:
            yield text


def build_corpus(
    output: str | Path, *, seed: int = 1234, library: Path | None = None
) -> CorpusStats:
    """Write the corpus as JSON lines with the key `text`.

    Args:
        output: path of the file; it appears when it is complete.
        seed: seed of the document order.
        library: folder of sources; None means this Python's standard library.

    Returns:
        Statistics of the corpus.
    """
    topics = _topics()
    texts, seen = list(topics), set(topics)
    unreadable = duplicates = 0
    for text in _sources(standard_library() if library is None else library):
        if text is None:
            unreadable += 1
        elif not text.strip() or text in seen:
            duplicates += 1
        else:
            seen.add(text)
            texts.append(text)
    random.Random(seed).shuffle(texts)
    with atomic_write(Path(output)) as stream:
        for text in texts:
            stream.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
    return CorpusStats(
        documents=len(texts),
        text_bytes=sum(len(text.encode()) for text in texts),
        topics=len(topics),
        unreadable_files=unreadable,
        duplicates=duplicates,
    )


PROMPTS = ("def __init__(self,", "import os\nimport sys\n", "The following functions")
VOCABULARY = 4096
SEQUENCE = 256
#: Longest sequence in generation, so that conversations with tools fit. Positions after `SEQUENCE`
#: are not trained.
CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions:
    """Options of the quickstart."""

    output_dir: str = "runs/quickstart"
    """Folder for all results."""
    train_iters: int = 240
    """Number of optimizer steps, of 4,096 tokens each."""
    nproc: int = 2
    """Number of training processes, used as tensor-parallel ranks."""
    mtp_num_layers: int | None = None
    """Train this many multi-token prediction depths too; generation then uses them for drafts."""


@dataclass(frozen=True)
class Folder:
    """Paths of the results of each stage."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer.json"

    @property
    def tokens(self) -> Path:
        """Prefix of the token files."""
        return self.root / "tokens"

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        return self.root / "loss_curve.png"

    @property
    def continuations(self) -> Path:
        return self.root / "continuations.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"


def training_options(options: QuickstartOptions, folder: Folder) -> dict[str, Any]:
    """Return the options of the training run, by name: 5.2 million parameters, 1 million tokens."""
    iterations = options.train_iters
    return {
        **({} if options.mtp_num_layers is None else {"mtp-num-layers": options.mtp_num_layers}),
        "num-layers": 4,
        "hidden-size": 256,
        "ffn-hidden-size": 768,
        "num-attention-heads": 8,
        "group-query-attention": True,
        "num-query-groups": 4,
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": True,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "seq-length": SEQUENCE,
        "max-position-embeddings": CONTEXT,
        "micro-batch-size": 8,
        "global-batch-size": 16,
        "train-iters": iterations,
        "bf16": True,
        "tensor-model-parallel-size": options.nproc,
        "sequence-parallel": options.nproc > 1,
        "lr": 3e-3,
        "min-lr": 3e-4,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": max(1, iterations // 20),
        "weight-decay": 0.1,
        "adam-beta2": 0.95,
        "eval-interval": max(1, iterations // 5),
        "eval-iters": 4,
        "tokenizer-type": "hf",
        "tokenizer-model": str(folder.tokenizer),
        "data-path": (str(folder.tokens),),
        "split": "97,3",
        "save": str(folder.checkpoints),
        "load": str(folder.checkpoints),
        "save-interval": max(1, iterations // 3),
        "log-interval": max(1, iterations // 34),
        "log-throughput": True,
        "tensorboard-dir": str(folder.root / "tensorboard"),
        "metrics-file": str(folder.metrics),
    }


def print_line(text: str) -> None:
    """Print a line and flush."""
    print(text, flush=True)


def stage(number: int, title: str, *, is_done: bool, work: Callable[[], str]) -> None:
    """Run one stage, or report that its result already exists."""
    if is_done:
        print_line(f"[{number}/5] {title}: done before")
        return
    print_line(f"[{number}/5] {title} ...")
    start = time.monotonic()
    result = work()
    print_line(f"[{number}/5] {title}: {result} ({time.monotonic() - start:.1f} s)")


def make_corpus(folder: Folder) -> str:
    """Collect the text of this Python installation."""

    stats = build_corpus(folder.corpus)
    return f"{stats.documents:,} documents, {stats.text_bytes / 1e6:.1f} MB"


def make_tokenizer(folder: Folder) -> str:
    """Train the tokenizer on the corpus."""
    from megatron.cli.tokenizers import train_bpe
    from megatron.training.data.documents import Tally, read_documents

    texts = read_documents([folder.corpus], Tally())
    tokenizer = train_bpe(texts, VOCABULARY, folder.tokenizer)
    return f"{tokenizer.vocab_size:,} tokens"


def make_tokens(folder: Folder) -> str:
    """Encode the corpus into token files."""
    run_module(
        "megatron.training.preprocess_data",
        ["--input", str(folder.corpus), "--output-prefix", str(folder.tokens)]
        + ["--tokenizer-type", "hf", "--tokenizer-model", str(folder.tokenizer), "--append-eod"],
    )
    return f"{folder.tokens}.bin"


def train(options: QuickstartOptions, folder: Folder) -> str:
    """Train, resuming from the last checkpoint if there is one."""
    arguments = ["--standalone", "--nproc-per-node", str(options.nproc)]
    arguments += ["-m", "megatron.training.pretrain_gpt", "--config", str(folder.config)]
    threads = max(1, (os.cpu_count() or 1) // options.nproc)
    run_module("torch.distributed.run", arguments, environment={"OMP_NUM_THREADS": str(threads)})
    return f"checkpoint {last_checkpoint(folder)}"


def generate(options: QuickstartOptions, folder: Folder) -> str:
    """Load the last checkpoint and generate continuations of the prompts."""
    arguments = ["--load", str(folder.checkpoints), "--max-new-tokens", "64"]
    arguments += ["--temperature", "0.7", "--top-p", "0.95", "--seed", "1"]
    arguments += ["--output-json", str(folder.continuations)]
    if options.mtp_num_layers is not None:
        arguments += ["--speculative-method", "mtp"]
    for prompt in PROMPTS:
        arguments += ["--prompt", prompt]
    run_module("megatron.inference.generate", arguments)
    return str(folder.continuations)


def run_module(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> None:
    """Run `python -m module` with its output on this terminal.

    Raises:
        RunStopped: the program failed; its own output states the reason.
    """
    program = "torchrun" if module == "torch.distributed.run" else f"python -m {module}"
    print_line(f"      $ {program} {shlex.join(arguments)}")
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **(environment or {})},
        check=False,
    )
    if process.returncode:
        code = process.returncode if process.returncode > 0 else ExitCode.CRASH
        raise RunStopped(
            ExitCode(code) if code in set(ExitCode) else ExitCode.CRASH,
            f"{program} ended with {process.returncode}; its output above says why",
        )


def last_checkpoint(folder: Folder) -> Path | None:
    """Return the newest checkpoint's folder."""
    checkpoints = sorted(path for path in folder.checkpoints.glob("iter_*") if path.suffix == "")
    return checkpoints[-1] if checkpoints else None


def check_config(text: str, folder: Folder) -> None:
    """Write the run's options, or compare them with those the folder was created with.

    Raises:
        ValueError: the folder belongs to a run with other options.
    """
    if folder.config.exists() and read_text(folder.config, MAX_JSON_BYTES) != text:
        raise ValueError(
            f"{folder.root} was made with other options: remove it, or name another --output-dir"
        )
    replace_file(folder.config, text)


def config_text(values: Mapping[str, Any]) -> str:
    """Return the options of the training run as YAML."""
    from megatron.cli.schema import options as schema_options
    from megatron.cli.yaml_file import write_options
    from megatron.training.config import Config

    chosen = [option for option in schema_options(Config) if option.name in values]
    return write_options(values, chosen)


def summarise(folder: Folder, seconds: float) -> dict[str, Any]:
    """Compute the summary of a finished run from its metrics, and write it."""
    from megatron.training.monitoring.metrics import read_metrics

    events = read_metrics(folder.metrics)
    validation = [e["lm_loss"] for e in events if e["kind"] == "validation"]
    training = [e for e in events if e["kind"] == "train"]
    ends = [e for e in events if e["kind"] == "end"]
    summary = {
        "first_validation_loss": validation[0],
        "last_validation_loss": validation[-1],
        "tokens_per_second": statistics.median(e["tokens_per_second"] for e in training),
        "peak_memory_bytes": int(max(e["peak_memory_bytes"] for e in ends)),
        "checkpoint": str(last_checkpoint(folder)),
        "loss_curve": str(folder.curve),
        "seconds": round(seconds, 1),
    }
    replace_file(folder.summary, json.dumps(summary, indent=1) + "\n")
    return summary


def show_continuations(folder: Folder) -> None:
    """Print the continuations of an earlier call."""
    print_line("\nContinuations")
    for result in read_json(folder.continuations):
        print_line(f"\n  prompt:       {result['prompt']!r}\n  continuation: {result['text']!r}")


def show_summary(folder: Folder, summary: Mapping[str, Any]) -> None:
    """Print the numbers of the run."""
    first_loss, last_loss = summary["first_validation_loss"], summary["last_validation_loss"]
    print_line("\nSummary")
    print_line(
        f"  validation loss  {first_loss:.4f} -> {last_loss:.4f} "
        f"({last_loss / first_loss:.0%} of the first)"
    )
    print_line(f"  speed            {summary['tokens_per_second']:,.0f} tokens/s")
    print_line(f"  peak memory      {summary['peak_memory_bytes'] / 1e6:,.0f} MB per rank")
    print_line(f"  checkpoint       {summary['checkpoint']}")
    print_line(f"  loss curve       {summary['loss_curve']}")
    print_line(f"  time             {summary['seconds']:.0f} s")
    print_line(f"  summary          {folder.summary}")


def run(options: QuickstartOptions) -> None:
    """Run all stages that are not done."""
    start = time.monotonic()
    folder = Folder(Path(options.output_dir))
    folder.root.mkdir(parents=True, exist_ok=True)
    check_config(config_text(training_options(options, folder)), folder)
    stage(1, "gather text", is_done=folder.corpus.exists(), work=lambda: make_corpus(folder))
    stage(
        2,
        "train the tokenizer",
        is_done=folder.tokenizer.exists(),
        work=lambda: make_tokenizer(folder),
    )
    encoded = Path(f"{folder.tokens}.idx").exists()
    stage(3, "encode the text", is_done=encoded, work=lambda: make_tokens(folder))
    final = folder.checkpoints / f"iter_{options.train_iters:07d}"
    stage(4, "train the model", is_done=final.exists(), work=lambda: train(options, folder))
    continued = folder.continuations.exists()
    stage(5, "continue prompts", is_done=continued, work=lambda: generate(options, folder))
    from megatron.training.plot import plot_loss

    plot_loss(
        folder.metrics, folder.curve, title="Quickstart: 5 M parameter GPT on Python's own text"
    )
    if continued:  # otherwise they have just been printed
        show_continuations(folder)
    show_summary(folder, summarise(folder, time.monotonic() - start))


def main() -> None:
    """Run the command."""
    line = parse_command_line(
        QuickstartOptions,
        sys.argv[1:],
        prog="python -m megatron.training.quickstart",
        description="Train a small GPT on text of this machine, and generate continuations.",
    )
    run(line.config)


if __name__ == "__main__":
    run_command(lambda: run_entry_point(main, prog="quickstart"))
