# SPDX-License-Identifier: Apache-2.0
r"""Continue prompts with a trained model: `python -m megatron.inference.generate --load DIR ...`.

    python -m megatron.inference.generate --load runs/quickstart/checkpoints \
        --prompt "The list type" --max-new-tokens 64 --temperature 0.7 --top-p 0.95
    python -m megatron.inference.generate --load Qwen3-0.6B --chat

One process loads a checkpoint of any layout; `torchrun --nproc-per-node N` with
`--tensor-model-parallel-size N` shards it, and without, N replicas share the prompts. All write the
same text.

Generated text is shown as it comes, without splitting a character and with prompts in order. Files
can hold what was generated for all prompts: one JSON list, or JSON lines as outputs end. `--chat`
reads turns from the terminal and answers them; what was computed for earlier turns is reused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from megatron.cli.error_reports import ErrorReports
from megatron.cli.errors import run_entry_point
from megatron.cli.launch import Launch
from megatron.cli.standard_streams import run_command
from megatron.core.untrusted_files import replace_file, write_to
from megatron.inference.config import GenerateConfig, parse_arguments, read_prompts, start_facts

if TYPE_CHECKING:
    from megatron.core.inference.router import Replicas
    from megatron.core.inference.scheduler import CacheStats
    from megatron.inference.checkpoint_model import CheckpointModel
    from megatron.inference.llm import LLM, Piece, Result, TextParams

PROG = "python -m megatron.inference.generate"


def write_json(path: str | Path, results: Sequence[Result]) -> None:
    """Write a JSON list, one object and one line per result; the file appears whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    lines = (json.dumps(r.to_json(), ensure_ascii=False) for r in results)
    text = "[\n" + ",\n".join(lines) + "\n]"
    try:
        replace_file(Path(path), text + "\n")
    except OSError as error:
        raise ValueError(f"--output-json {path} cannot be written: {error.strerror}") from None


def check_json_path(path: str | Path, flag: str = "--output-json") -> None:
    """Make the folder of a file to be written, so that a bad path is known before the work.

    Raises:
        ValueError: the folder cannot be made or written to, or `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: cannot make the folder {path.parent}: {error.strerror}"
        ) from None
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{flag} {path}: no permission to write in {path.parent}")


class Display:
    """Print prompts and their continuations in order, each as soon as its turn has come.

    The first unfinished output is printed token by token; the others follow with what they have by
    then.

    Args:
        texts: the prompts.
        outputs: continuations of each.
        out: where to print.
    """

    def __init__(self, texts: Sequence[str], outputs: int, out: TextIO) -> None:
        self._texts, self._count, self._out = texts, outputs, out
        self._current = 0
        self._begun = False
        self._held: dict[int, str] = {}
        self._ended: set[int] = set()

    def update(self, piece: Piece) -> None:
        """Take what a step added to an output and print what can be printed."""
        place = piece.prompt * self._count + piece.index
        self._held[place] = self._held.get(place, "") + piece.text
        if piece.result is not None:
            self._ended.add(place)
        while self._current in self._held:
            if not self._begun:
                self._begin()
            print(self._held.pop(self._current), end="", file=self._out, flush=True)
            if self._current not in self._ended:
                return
            print(file=self._out, flush=True)
            self._current += 1
            self._begun = False

    def _begin(self) -> None:
        self._begun = True
        prompt, index = divmod(self._current, self._count)
        title = f"prompt {prompt + 1} of {len(self._texts)}"
        if self._count > 1:
            title += f", output {index + 1} of {self._count}"
        if len(self._texts) * self._count > 1:
            print(f"--- {title}", file=self._out)
        print(self._texts[prompt], end="", file=self._out)


def text_params(config: GenerateConfig) -> TextParams:
    """Return what the options ask for. Raises ValueError for a value out of range."""
    from megatron.core.inference.sampling import SamplingParams
    from megatron.inference.llm import TextParams

    chosen = config.sampling
    return TextParams(
        max_new_tokens=chosen.max_new_tokens,
        sampling=SamplingParams(
            temperature=chosen.temperature,
            top_k=chosen.top_k,
            top_p=chosen.top_p,
            min_p=chosen.min_p,
            repetition_penalty=chosen.repetition_penalty,
            presence_penalty=chosen.presence_penalty,
            frequency_penalty=chosen.frequency_penalty,
            seed=chosen.seed,
            logprobs=config.output.logprobs or None,
        ),
        stop=chosen.stop or (),
        num_outputs=config.prompts.num_outputs,
        prompt_logprobs=config.output.prompt_logprobs,
    )


def blocks_of(lengths: Sequence[int], rows: int, block_size: int) -> int:
    """Return the blocks that any `rows` texts of so many tokens take at once."""
    return sum(sorted((-(-n // block_size) for n in lengths), reverse=True)[:rows])


def open_llm(loaded: CheckpointModel, config: GenerateConfig, texts: Sequence[str]) -> LLM:
    """Return the model with an engine that fits the prompts, or conversations.

    Raises:
        ValueError: a prompt that the model cannot take, or too little memory.
    """
    from megatron.inference.llm import LLM, text_requests

    blocks = None
    if config.inference.inference_memory_gb is None and not config.prompts.chat:
        requests = text_requests(loaded, texts, text_params(config))
        lengths = [len(r.prompt) + r.max_new_tokens for r in requests for _ in range(r.n)]
        rows, size = config.inference.inference_max_requests, config.inference.inference_block_size
        blocks = blocks_of(lengths, rows, size)
    return LLM(loaded, config.inference, num_blocks=blocks)


class JsonLines:
    """Results as JSON lines, each written as soon as it is there.

    Args:
        path: of the file; None writes nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            check_json_path(path, "--output-jsonl")
            try:
                self._file = write_to(path, "w")
            except OSError as error:
                raise ValueError(
                    f"--output-jsonl {path} cannot be written: {error.strerror}"
                ) from None

    def write(self, result: Result) -> None:
        """Add a line."""
        if self._file is not None:
            self._file.write(json.dumps(result.to_json(), ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def check_finite(result: Result, prompt: int) -> None:
    """Raise ValueError for an output that ended because logits were not finite."""
    if result.finish_reason == "error":
        raise ValueError(
            f"the model's logits are not finite at token {len(result.ids) + 1} of prompt "
            f"{prompt + 1}: its weights are damaged or its training has diverged; take an earlier "
            "checkpoint"
        )


def continue_prompts(llm: LLM, texts: Sequence[str], config: GenerateConfig, *, leads: bool) -> int:
    """Continue all prompts; rank 0 prints and writes. Return how many tokens were generated.

    Raises:
        ValueError: a prompt that the model cannot take, logits that are not finite, or a file that
            cannot be written.
    """
    params = text_params(config)
    display = Display(texts, params.num_outputs, sys.stdout) if leads else None
    found: dict[tuple[int, int], Result] = {}
    with contextlib.closing(JsonLines(config.output.output_jsonl if leads else None)) as lines:
        for piece in llm.stream(texts, params):
            if piece.result is not None:
                check_finite(piece.result, piece.prompt)
                found[piece.prompt, piece.index] = piece.result
                lines.write(piece.result)
            if display is not None:
                display.update(piece)
    if leads and config.output.output_json is not None:
        write_json(config.output.output_json, [found[key] for key in sorted(found)])
    return sum(len(result.ids) for result in found.values())


def converse(llm: LLM, turns: Iterator[str], config: GenerateConfig, *, out: TextIO | None) -> int:
    """Answer turn after turn of one conversation; return how many tokens were generated.

    Args:
        llm: model and engine; what it computed for earlier turns is reused.
        turns: what the user says.
        config: how to sample, and which template.
        out: where to print answers; None prints nothing.

    Raises:
        ValueError: no template, a conversation that it refuses or that is too long.
    """
    from megatron.training.data.chat import TemplateRefusal, read_chat_template

    loaded = llm.loaded
    template = read_chat_template(config.prompts.chat_template, tokenizer_model=loaded.chat_folder)
    params = text_params(config)
    messages: list[dict[str, Any]] = []
    generated = 0
    with (
        contextlib.closing(template),
        contextlib.closing(JsonLines(config.output.output_jsonl if out else None)) as lines,
    ):
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            try:
                text = template.render(messages, add_generation_prompt=True)
            except TemplateRefusal as error:
                raise ValueError(f"the chat template refuses the conversation: {error}") from None
            answer = ""
            pieces = llm.stream([text], params, first_sequence=len(messages))
            for piece in pieces:
                answer += piece.text
                if out is not None:
                    print(piece.text, end="", file=out, flush=True)
                if piece.result is not None:
                    check_finite(piece.result, len(messages) // 2)
                    generated += len(piece.result.ids)
                    lines.write(piece.result)
            if out is not None:
                print(file=out, flush=True)
            messages.append({"role": "assistant", "content": answer})
    return generated


def read_turns(first: Sequence[str], source: TextIO, prompt: TextIO | None) -> Iterator[str]:
    """Yield the turns that were given, then lines of `source` to its end; blank ones are skipped.

    Args:
        first: turns from the command line, echoed.
        source: where further ones are typed.
        prompt: where to print a mark before each; None prints none.
    """
    for turn in first:
        if prompt is not None:
            print(f"> {turn}", file=prompt, flush=True)
        yield turn
    while True:
        if prompt is not None:
            print("> ", end="", file=prompt, flush=True)
        line = source.readline()
        if not line:
            if prompt is not None:
                print(file=prompt, flush=True)
            return
        if line.strip():
            yield line.strip()


def describe(stats: CacheStats) -> str:
    """Return what the engine did in a few words, as for the last line of a run."""
    parts = [f"{stats.steps:,} steps", f"{stats.computed:,} tokens computed"]
    if stats.queried:
        parts.append(f"prefix cache {stats.hit:,} of {stats.queried:,} prompt tokens")
    if stats.drafted:
        parts.append(
            f"accepted {stats.accepted:,} of {stats.drafted:,} drafts, "
            f"{stats.tokens_per_forward:.2f} tokens a forward"
        )
    if stats.preempted:
        parts.append(f"{stats.preempted:,} preempted for want of memory")
    if stats.wasted:
        parts.append(f"{stats.wasted:,} tokens wasted on ended texts")
    return ", ".join(parts)


def totals(replicas: Replicas) -> str:
    """Return what the engines of all replicas did in a few words."""
    first, *others = replicas.stats()
    found = describe(sum(others, first))
    if replicas.router is not None:
        sent = " + ".join(f"{count:,}" for count in replicas.router.requests)
        found += f", {sent} requests by replica"
    return found


def run(config: GenerateConfig, launch: Launch, reports: ErrorReports) -> None:
    """Load the model, continue the prompts; rank 0 prints and writes what came out.

    Args:
        config: what to continue, and how.
        launch: which rank this is.
        reports: agrees with the other ranks on errors.

    Raises:
        ValueError: anything the user can fix.
    """
    texts = read_prompts(config.prompts)
    if config.prompts.chat and launch.world_size > 1:
        raise ValueError(
            f"--chat reads the terminal of one process, and {launch.world_size} were started: "
            "start it without torchrun"
        )
    leads = launch.rank == 0
    if leads and config.output.output_json is not None:
        check_json_path(config.output.output_json)
    text_params(config)  # bad values are known before the model is loaded
    from megatron.inference.checkpoint_model import load_checkpoint_model

    source = config.source
    if config.prompts.chat and source.tokenizer_hf_no_include_special_tokens is None:
        # A rendered template holds its special tokens itself.
        source = dataclasses.replace(source, tokenizer_hf_no_include_special_tokens=True)
    with load_checkpoint_model(
        source,
        launch,
        speculation=config.speculation,
        facts=start_facts(config, prompts=texts),
        reports=reports,
    ) as loaded:
        llm = open_llm(loaded, config, texts)
        start = time.perf_counter()
        if config.prompts.chat:
            shown = sys.stdout if sys.stdin.isatty() else None
            turns = read_turns(texts, sys.stdin, shown)
            tokens = converse(llm, turns, config, out=sys.stdout)
        else:
            tokens = continue_prompts(llm, texts, config, leads=leads)
        seconds = time.perf_counter() - start
        done = totals(llm.replicas)
    if leads:
        what = "a conversation" if config.prompts.chat else f"{len(texts)} prompt(s)"
        print(
            f"generated {tokens:,} tokens from {what} in {seconds:.1f} s "
            f"({tokens / seconds:,.0f} tokens/s) with {loaded.folder}",
            file=sys.stderr,
        )
        print(done, file=sys.stderr)
        if llm.engine.graphs is not None:
            print(llm.engine.graphs, file=sys.stderr)


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return this process's exit code.

    Args:
        argv: arguments without the program's name.
        environment: of this process, where torchrun gives its rank.
    """
    reports = ErrorReports(environment)
    return run_entry_point(
        lambda: run(
            parse_arguments(argv, prog=PROG), Launch.from_environment(environment), reports
        ),
        prog=PROG,
        report=reports.report,
    )


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], os.environ))
