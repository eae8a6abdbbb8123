# SPDX-License-Identifier: Apache-2.0
"""The options of `generate`, and its prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.cli.flags import HelpRequested, parse_command_line
from megatron.cli.schema import flatten, options
from megatron.cli.yaml_file import write_options
from megatron.core.untrusted_files import read_named
from megatron.inference.config import Inference, ModelSource, Speculation, check

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
