# SPDX-License-Identifier: Apache-2.0
r"""Continue prompts with a trained model: `python -m megatron.inference.generate --load DIR ...`.

    python -m megatron.inference.generate --load runs/quickstart/checkpoints \
        --prompt "The list type" --max-new-tokens 64 --temperature 0.7 --top-p 0.95
    python -m megatron.inference.generate --load Qwen3-0.6B --chat

One process loads a checkpoint of any layout. Under `torchrun --nproc-per-node N`,
`--tensor-model-parallel-size N` shards the model; without it, N replicas share the prompts. The
generated text is the same in every case.

Generated text is printed as it arrives, in the order of the prompts and never within a character.
The outputs of all prompts can be written to files: one JSON list, or JSON lines as outputs finish.
`--chat` reads turns from the terminal and answers them; the prefix cache holds the earlier turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from megatron.cli.error_reports import ErrorReports
from megatron.cli.errors import run_entry_point
from megatron.cli.flags import HelpRequested, parse_command_line
from megatron.cli.launch import Launch
from megatron.cli.schema import flatten, options
from megatron.cli.standard_streams import run_command
from megatron.cli.yaml_file import write_options
from megatron.core.untrusted_files import read_named, replace_file, write_to
from megatron.inference.config import Inference, ModelSource, Speculation, check, start_facts

#: Largest prompt file, in bytes.
MAX_PROMPT_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts."""

    prompt: tuple[str, ...] = ()
    """Text to continue; repeat the flag for several. An empty text starts a new document."""
    prompt_file: str | None = None
    """UTF-8 file with one prompt per line, after those of --prompt; blank lines are skipped."""
    chat: bool = False
    """Chat with the model in the terminal, one line per turn, until the end of the input. Texts of
    --prompt or --prompt-file are the first turns."""
    chat_template: str | None = None
    """Chat template: a Jinja file, or chatml, llama3 or plain; derived: the template of the
    tokenizer's folder."""
    num_outputs: int = 1
    """Outputs per prompt, each with different random draws."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling: penalties, then temperature, then top-k, top-p and min-p together."""

    max_new_tokens: int = 64
    """Maximum number of new tokens per output; an end-of-document token ends it earlier."""
    stop: tuple[str, ...] | None = None
    """Strings that end an output and are not part of it; they need not align with tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 = greedy sampling."""
    top_k: int = 0
    """Keep only the k most probable tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability; 1 = all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the most probable one; 0 = all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 =
    none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once per occurrence; -2 to 2."""
    seed: int = 1234
    """Seed of sampling; the same seed repeats the draws in any layout and batch size."""


@dataclass(frozen=True, kw_only=True)
class GenerateOutput:
    """Output files."""

    output_json: str | None = None
    """File for a JSON list with one object per output, in the order of the prompts: prompt,
    prompt_ids, index, text, ids, logprobs (of ids, natural logarithm, before temperature and
    filters), finish_reason; with the options below also top_logprobs and prompt_logprobs."""
    output_jsonl: str | None = None
    """File for the same objects as JSON lines, each as soon as its output has finished."""
    logprobs: int = 0
    """Number of most probable tokens to report per generated token, at most 20."""
    prompt_logprobs: bool = False
    """Report the log-probability of each prompt token after the first."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """One run of text generation."""

    source: ModelSource
    prompts: Prompts
    sampling: Sampling
    inference: Inference
    output: GenerateOutput
    speculation: Speculation

    def __post_init__(self) -> None:
        check(self.source, self.inference, self.speculation)
        for name, value in (
            ("num-outputs", self.prompts.num_outputs),
            ("max-new-tokens", self.sampling.max_new_tokens),
        ):
            if value <= 0:
                raise ValueError(f"--{name} is {value}: it must be above 0")
        chat, output = self.prompts.chat, self.output
        if chat and output.output_json is not None:
            raise ValueError("--output-json cannot be combined with --chat: give --output-jsonl")
        if chat and self.prompts.num_outputs > 1:
            raise ValueError(
                "--num-outputs cannot be combined with --chat: a turn has one response"
            )
        if self.prompts.chat_template is not None and not chat:
            raise ValueError("--chat-template applies to conversations: give --chat as well")
        if output.output_json is None and output.output_jsonl is None:
            for name, is_set in (
                ("logprobs", output.logprobs),
                ("prompt-logprobs", output.prompt_logprobs),
            ):
                if is_set:
                    raise ValueError(
                        f"--{name} applies to output files only: give --output-json or "
                        "--output-jsonl"
                    )


def split_prompts(argv: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Split arguments into the texts of every `--prompt` and all other arguments.

    `--prompt` is parsed separately because it can be repeated and its text may start with dashes.

    Raises:
        ValueError: `--prompt` is last and has no text.
    """
    prompts: list[str] = []
    arguments: list[str] = []
    remaining = iter(argv)
    for word in remaining:
        name, equals, inline = word.partition("=")
        if name != "--prompt":
            arguments.append(word)
        elif equals:
            prompts.append(inline)
        else:
            text = next(remaining, None)
            if text is None:
                raise ValueError(
                    "--prompt is empty: give a text, such as --prompt 'Once upon a time'"
                )
            prompts.append(text)
    return tuple(prompts), arguments


def parse_arguments(argv: Sequence[str], *, prog: str) -> GenerateConfig:
    """Read the command line of `megatron.inference.generate`.

    Raises:
        HelpRequested: `--help` or `--print-config`.
        ValueError: a flag is unknown or missing, or its value is invalid; one line.
    """
    texts, arguments = split_prompts(argv)
    line = parse_command_line(
        GenerateConfig,
        arguments,
        prog=prog,
        description="Generate continuations of prompts with a trained model.",
        print_now=False,
    )
    config = line.config
    if texts:  # without --prompt, the prompts of a --config file apply
        config = dataclasses.replace(
            config, prompts=dataclasses.replace(config.prompts, prompt=texts)
        )
    if line.invocation.print_config:
        values = flatten(config)
        set_options = [o for o in options(GenerateConfig) if values[o.name] != ()]
        raise HelpRequested(write_options(values, set_options))
    return config


def read_prompts(prompts: Prompts) -> list[str]:
    """Return the prompts: the texts of `--prompt`, then the lines of `--prompt-file`.

    Raises:
        ValueError: the file cannot be read, or there is no prompt at all.
    """
    texts = list(prompts.prompt)
    if prompts.prompt_file is not None:
        try:
            lines = read_named(prompts.prompt_file, MAX_PROMPT_BYTES).splitlines()
        except OSError as error:
            raise ValueError(
                f"--prompt-file {prompts.prompt_file} cannot be read: {error}"
            ) from None
        texts += [line for line in lines if line.strip()]
    if not texts and not prompts.chat:
        raise ValueError(
            "no prompt: give --prompt TEXT, a --prompt-file that contains text, or --chat"
        )
    return texts


if TYPE_CHECKING:
    from megatron.core.inference.request_state import SchedulerStats
    from megatron.core.inference.router import Replicas
    from megatron.inference.checkpoint_model import CheckpointModel
    from megatron.inference.llm import LLM, TextDelta, TextOutput, TextParams

PROG = "python -m megatron.inference.generate"


def write_json(path: str | Path, outputs: Sequence[TextOutput]) -> None:
    """Write a JSON list, one object and one line per output, and replace the file atomically.

    Raises:
        ValueError: the file cannot be written.
    """
    lines = (json.dumps(output.to_json(), ensure_ascii=False) for output in outputs)
    text = "[\n" + ",\n".join(lines) + "\n]"
    try:
        replace_file(Path(path), text + "\n")
    except OSError as error:
        raise ValueError(f"--output-json {path} cannot be written: {error.strerror}") from None


def check_json_path(path: str | Path, flag: str = "--output-json") -> None:
    """Create the folder of an output file, so that a bad path is reported before the model loads.

    Raises:
        ValueError: the folder cannot be created or written to, or `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: cannot create the folder {path.parent}: {error.strerror}"
        ) from None
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{flag} {path}: no permission to write in {path.parent}")


class OrderedPrinter:
    """Print prompts and their continuations in the order of the prompts.

    The first unfinished output is printed token by token. Text of later outputs is buffered until
    all outputs before them have finished.

    Args:
        texts: the prompts.
        num_outputs: number of continuations per prompt.
        out: where to print.
    """

    def __init__(self, texts: Sequence[str], num_outputs: int, out: TextIO) -> None:
        self._texts, self._num_outputs, self._out = texts, num_outputs, out
        self._current = 0
        self._header_printed = False
        self._unprinted: dict[int, str] = {}
        self._finished: set[int] = set()

    def update(self, delta: TextDelta) -> None:
        """Buffer the new text of an output, and print the buffers whose turn it is."""
        output = delta.prompt * self._num_outputs + delta.index
        self._unprinted[output] = self._unprinted.get(output, "") + delta.text
        if delta.output is not None:
            self._finished.add(output)
        while self._current in self._unprinted:
            if not self._header_printed:
                self._print_header()
            print(self._unprinted.pop(self._current), end="", file=self._out, flush=True)
            if self._current not in self._finished:
                return
            print(file=self._out, flush=True)
            self._current += 1
            self._header_printed = False

    def _print_header(self) -> None:
        self._header_printed = True
        prompt, index = divmod(self._current, self._num_outputs)
        title = f"prompt {prompt + 1} of {len(self._texts)}"
        if self._num_outputs > 1:
            title += f", output {index + 1} of {self._num_outputs}"
        if len(self._texts) * self._num_outputs > 1:
            print(f"--- {title}", file=self._out)
        print(self._texts[prompt], end="", file=self._out)


def text_params(config: GenerateConfig) -> TextParams:
    """Return the sampling options as `TextParams`. Raises ValueError for a value out of range."""
    from megatron.core.inference.sampling import SamplingParams
    from megatron.inference.llm import TextParams

    sampling = config.sampling
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    shared_fields = {name: value for name, value in vars(sampling).items() if name in names}
    return TextParams(
        max_new_tokens=sampling.max_new_tokens,
        sampling=SamplingParams(**shared_fields, logprobs=config.output.logprobs or None),
        stop=sampling.stop or (),
        num_outputs=config.prompts.num_outputs,
        prompt_logprobs=config.output.prompt_logprobs,
    )


def max_blocks(lengths: Sequence[int], max_requests: int, block_size: int) -> int:
    """Return the maximum number of cache blocks that `max_requests` sequences with `lengths` use at
    once."""
    return sum(sorted((-(-n // block_size) for n in lengths), reverse=True)[:max_requests])


def open_llm(loaded: CheckpointModel, config: GenerateConfig, texts: Sequence[str]) -> LLM:
    """Return the model with an engine whose cache fits the prompts, or a conversation.

    Raises:
        ValueError: a prompt is invalid for the model, or there is too little memory.
    """
    from megatron.inference.llm import LLM, text_requests

    num_blocks = None
    if config.inference.inference_memory_gb is None and not config.prompts.chat:
        requests = text_requests(loaded, texts, text_params(config))
        lengths = [len(r.prompt) + r.max_new_tokens for r in requests for _ in range(r.n)]
        max_requests, block_size = (
            config.inference.inference_max_requests,
            config.inference.inference_block_size,
        )
        num_blocks = max_blocks(lengths, max_requests, block_size)
    return LLM(loaded, config.inference, num_blocks=num_blocks)


class ResultWriter:
    """Write outputs as JSON lines, each as soon as it has finished.

    Args:
        path: path of the file; None writes nothing.
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

    def write(self, output: TextOutput) -> None:
        """Add a line."""
        if self._file is not None:
            self._file.write(json.dumps(output.to_json(), ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def check_finite(output: TextOutput, prompt_index: int) -> None:
    """Raise ValueError for an output that ended because logits were not finite."""
    if output.finish_reason == "error":
        raise ValueError(
            f"the model's logits are not finite at token {len(output.ids) + 1} of prompt "
            f"{prompt_index + 1}: its weights are damaged or its training has diverged; use an "
            "earlier checkpoint"
        )


def continue_prompts(
    llm: LLM, texts: Sequence[str], config: GenerateConfig, *, is_rank_0: bool
) -> int:
    """Continue all prompts; rank 0 prints and writes. Return how many tokens were generated.

    Raises:
        ValueError: a prompt is invalid for the model, logits are not finite, or a file cannot be
            written.
    """
    params = text_params(config)
    display = OrderedPrinter(texts, params.num_outputs, sys.stdout) if is_rank_0 else None
    outputs: dict[tuple[int, int], TextOutput] = {}
    with contextlib.closing(
        ResultWriter(config.output.output_jsonl if is_rank_0 else None)
    ) as writer:
        for delta in llm.stream(texts, params):
            if delta.output is not None:
                check_finite(delta.output, delta.prompt)
                outputs[delta.prompt, delta.index] = delta.output
                writer.write(delta.output)
            if display is not None:
                display.update(delta)
    if is_rank_0 and config.output.output_json is not None:
        write_json(config.output.output_json, [outputs[key] for key in sorted(outputs)])
    return sum(len(output.ids) for output in outputs.values())


def converse(llm: LLM, turns: Iterator[str], config: GenerateConfig, *, out: TextIO | None) -> int:
    """Answer turn after turn of one conversation; return how many tokens were generated.

    Args:
        llm: model and engine; its prefix cache holds the earlier turns.
        turns: texts of the user.
        config: sampling options and chat template.
        out: stream for the answers; None prints nothing.

    Raises:
        ValueError: there is no template, the template rejects the conversation, or it is too long.
    """
    from megatron.training.data.chat import TemplateRefusal, read_chat_template

    loaded = llm.loaded
    template = read_chat_template(config.prompts.chat_template, tokenizer_model=loaded.chat_folder)
    params = text_params(config)
    messages: list[dict[str, Any]] = []
    num_tokens = 0
    with (
        contextlib.closing(template),
        contextlib.closing(ResultWriter(config.output.output_jsonl if out else None)) as writer,
    ):
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            try:
                text = template.render(messages, add_generation_prompt=True)
            except TemplateRefusal as error:
                raise ValueError(f"the chat template rejects the conversation: {error}") from None
            answer = ""
            deltas = llm.stream([text], params, first_sequence=len(messages))
            for delta in deltas:
                answer += delta.text
                if out is not None:
                    print(delta.text, end="", file=out, flush=True)
                if delta.output is not None:
                    check_finite(delta.output, len(messages) // 2)
                    num_tokens += len(delta.output.ids)
                    writer.write(delta.output)
            if out is not None:
                print(file=out, flush=True)
            messages.append({"role": "assistant", "content": answer})
    return num_tokens


def read_turns(
    initial_turns: Sequence[str], source: TextIO, prompt: TextIO | None
) -> Iterator[str]:
    """Yield the initial turns, then the lines of `source`; blank lines are skipped.

    Args:
        initial_turns: turns from the command line, echoed to `prompt`.
        source: stream of further turns.
        prompt: stream for a `> ` before each turn; None prints none.
    """
    for turn in initial_turns:
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


def describe(stats: SchedulerStats) -> str:
    """Return the statistics of an engine as one line."""
    figures = [f"{stats.steps:,} steps", f"{stats.computed:,} tokens computed"]
    if stats.queried:
        figures.append(f"prefix cache {stats.hit:,} of {stats.queried:,} prompt tokens")
    if stats.drafted:
        figures.append(
            f"accepted {stats.accepted:,} of {stats.drafted:,} draft tokens, "
            f"{stats.tokens_per_forward:.2f} tokens per forward pass"
        )
    if stats.preempted:
        figures.append(f"{stats.preempted:,} preempted because the cache was full")
    if stats.wasted:
        figures.append(f"{stats.wasted:,} tokens computed after the end of their outputs")
    return ", ".join(figures)


def describe_replicas(replicas: Replicas) -> str:
    """Return the statistics of all replicas as one line."""
    stats = replicas.stats()
    summary = describe(sum(stats[1:], stats[0]))
    if replicas.router is not None:
        sent = " + ".join(f"{count:,}" for count in replicas.router.requests)
        summary += f", {sent} requests by replica"
    return summary


def run(config: GenerateConfig, launch: Launch, reports: ErrorReports) -> None:
    """Load the model and continue the prompts; rank 0 prints and writes the outputs.

    Args:
        config: options of the run.
        launch: rank and world size of this process.
        reports: agrees with the other ranks on errors.

    Raises:
        ValueError: anything the user can fix.
    """
    texts = read_prompts(config.prompts)
    if config.prompts.chat and launch.world_size > 1:
        raise ValueError(
            f"--chat reads the terminal of one process, but {launch.world_size} were started: "
            "start it without torchrun"
        )
    is_rank_0 = launch.rank == 0
    if is_rank_0 and config.output.output_json is not None:
        check_json_path(config.output.output_json)
    text_params(config)  # reports bad values before the model is loaded
    from megatron.inference.load_model import load_checkpoint_model

    source = config.source
    if config.prompts.chat and source.tokenizer_hf_no_include_special_tokens is None:
        # The chat template writes the special tokens; the tokenizer must not add them again.
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
            echo = sys.stdout if sys.stdin.isatty() else None
            turns = read_turns(texts, sys.stdin, echo)
            tokens = converse(llm, turns, config, out=sys.stdout)
        else:
            tokens = continue_prompts(llm, texts, config, is_rank_0=is_rank_0)
        seconds = time.perf_counter() - start
        summary = describe_replicas(llm.replicas)
    if is_rank_0:
        subject = "a conversation" if config.prompts.chat else f"{len(texts)} prompt(s)"
        print(
            f"generated {tokens:,} tokens from {subject} in {seconds:.1f} s "
            f"({tokens / seconds:,.0f} tokens/s) with {loaded.folder}",
            file=sys.stderr,
        )
        print(summary, file=sys.stderr)
        if llm.engine.graphs is not None:
            print(llm.engine.graphs, file=sys.stderr)


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return this process's exit code.

    Args:
        argv: arguments without the program's name.
        environment: environment variables, in which torchrun passes the rank.
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
