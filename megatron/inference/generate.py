# SPDX-License-Identifier: Apache-2.0
r"""Continue prompts with a trained model: `python -m megatron.inference.generate --load DIR ...`.

    python -m megatron.inference.generate --load runs/quickstart/checkpoints \
        --prompt "The list type" --max-new-tokens 64 --temperature 0.7 --top-p 0.95

One process loads a checkpoint of any layout; `torchrun --nproc-per-node N` with
`--tensor-model-parallel-size N` shards it. Both write the same text.

Generated text is shown while its list of tokens grows, without splitting a character and with
prompts in order. One JSON file can hold what was generated for all prompts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from megatron.cli.errors import run_entry_point
from megatron.cli.launch import Launch
from megatron.cli.standard_streams import run_command
from megatron.cli.tokenizers import continuation
from megatron.core.untrusted_files import replace_file
from megatron.inference.config import GenerateConfig, Sampling, parse_arguments, read_prompts

if TYPE_CHECKING:
    from megatron.core.inference.engine import Completion, Request
    from megatron.core.inference.sampling import SamplingParams
    from megatron.inference.checkpoint_model import CheckpointModel


@dataclass(frozen=True, kw_only=True)
class Result:
    """One prompt and its continuation.

    Args:
        prompt: the text that was given.
        prompt_ids: the tokens it became.
        text: the continuation, without the end-of-document token.
        ids: the generated tokens, the end-of-document token included.
        logprobs: the model's own log-probability of each of `ids` (natural logarithm, before
            temperature and filters).
        finish_reason: "stop" at the end of the document, "length" at the token limit.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def write_json(path: str | Path, results: Sequence[Result]) -> None:
    """Write a JSON list, one object and one line per result; the file appears whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    path = Path(path)
    lines = (json.dumps(dataclasses.asdict(r), ensure_ascii=False) for r in results)
    text = "[\n" + ",\n".join(lines) + "\n]"
    try:
        replace_file(path, text + "\n")
    except OSError as error:
        raise ValueError(f"--output-json {path} cannot be written: {error.strerror}") from None


def check_json_path(path: str | Path) -> None:
    """Make the folder of a JSON file to be written, so that a bad path is known before the work.

    Raises:
        ValueError: the folder cannot be made or written to, or `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"--output-json {path} is a folder: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output-json {path}: cannot make the folder {path.parent}: {error.strerror}"
        ) from None
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--output-json {path}: no permission to write in {path.parent}")


#: What decoding puts in place of bytes that are no whole character (yet).
REPLACEMENT = "�"


class TextStream:
    """Turn tokens, as they come, into pieces of text whose concatenation is the whole text.

    A byte-level token may end in the middle of a UTF-8 character; its text is held back until the
    character is whole or the stream is finished.

    Args:
        detokenize: the tokenizer's function from token ids to text.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._detokenize = detokenize
        self._shown_chars = 0

    def push(self, tokens: Sequence[int], *, finished: bool = False) -> str:
        """Return the text that `tokens` (all so far) add to what was returned before."""
        text = self._detokenize(tokens)
        if not finished:
            # A character has at most four bytes; whatever was invalid before them stays so.
            text = text[: len(text) - _incomplete(text)]
        piece = text[self._shown_chars :]
        self._shown_chars += len(piece)
        return piece


def _incomplete(text: str) -> int:
    """Return how many replacement characters at the end may still become part of a character."""
    return min(3, len(text) - len(text.rstrip(REPLACEMENT)))


class Display:
    """Print prompts and their continuations in order, each as soon as its turn has come.

    The first unfinished prompt of a batch is printed token by token; the others follow with what
    they have by then.

    Args:
        texts: the prompts.
        detokenizers: for each prompt, the function from the token ids that follow it to text.
        out: where to print.
    """

    def __init__(
        self,
        texts: Sequence[str],
        detokenizers: Sequence[Callable[[Sequence[int]], str]],
        out: TextIO,
    ) -> None:
        self._texts = texts
        self._detokenizers = detokenizers
        self._out = out
        self._current = 0
        self._stream: TextStream | None = None
        self._latest: dict[int, tuple[Sequence[int], bool]] = {}

    def update(self, index: int, tokens: Sequence[int], *, finished: bool) -> None:
        """Take the generated tokens so far of prompt `index` and print what can be printed."""
        self._latest[index] = (tokens, finished)
        if index > self._current:
            return
        while self._current in self._latest:
            tokens, finished = self._latest[self._current]
            if self._stream is None:
                self._begin()
                self._stream = TextStream(self._detokenizers[self._current])
            print(self._stream.push(tokens, finished=finished), end="", file=self._out, flush=True)
            if not finished:
                return
            print(file=self._out, flush=True)
            del self._latest[self._current]
            self._current += 1
            self._stream = None

    def _begin(self) -> None:
        if len(self._texts) > 1:
            print(f"--- prompt {self._current + 1} of {len(self._texts)}", file=self._out)
        print(self._texts[self._current], end="", file=self._out)


PROG = "python -m megatron.inference.generate"


class OnToken(Protocol):
    """Called after every token with the generated tokens so far of prompt `index`."""

    def __call__(self, index: int, tokens: Sequence[int], *, finished: bool) -> None: ...


def sampling_params(options: Sampling) -> SamplingParams:
    """Return the engine's sampling parameters. Raises ValueError for one out of range."""
    from megatron.core.inference.sampling import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )


def make_requests(
    loaded: CheckpointModel, texts: Sequence[str], max_new_tokens: int
) -> list[Request]:
    """Turn texts into requests and check all of them before anything is generated.

    An empty text becomes the end-of-document token, which stands before every document in
    training.

    Raises:
        ValueError: a prompt that the model cannot take.
    """
    from megatron.core.inference.engine import Request, check_requests

    requests = []
    for index, text in enumerate(texts):
        ids = loaded.tokenizer.tokenize(text)
        if not ids and loaded.tokenizer.eod is not None:
            ids = [loaded.tokenizer.eod]
        requests.append(Request(prompt=tuple(ids), sequence=index))
    check_requests(
        requests,
        max_new_tokens=max_new_tokens,
        max_length=loaded.max_length,
        vocab_size=loaded.vocab_size,
    )
    return requests


def generate_texts(
    loaded: CheckpointModel,
    texts: Sequence[str],
    *,
    params: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
    prefill_chunk_tokens: int | None = None,
    on_token: OnToken | None = None,
) -> list[Result]:
    """Continue texts, `batch_size` at a time; its size changes results by rounding alone.

    Args:
        loaded: model and tokenizer.
        texts: the prompts.
        params: how tokens are chosen.
        max_new_tokens: tokens to generate for each at most.
        batch_size: prompts that are generated together.
        prefill_chunk_tokens: of a prompt that are fed to the model at once; None is all.
        on_token: follows the generation.

    Raises:
        ValueError: a prompt that the model cannot take.
    """
    from megatron.core.inference.cache import StateCache
    from megatron.core.inference.engine import stream

    requests = make_requests(loaded, texts, max_new_tokens)
    states = StateCache(min(batch_size, max(1, len(requests))))  # of batch after batch
    completions: list[Completion] = []
    for start in range(0, len(requests), batch_size):
        done: list[Completion] = []
        for done in stream(
            loaded.model,
            requests[start : start + batch_size],
            max_new_tokens=max_new_tokens,
            sampling=params,
            stop_tokens=loaded.stop_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            states=states,
            device=loaded.device,
        ):
            for index, completion in enumerate(done, start):
                if on_token is not None:
                    on_token(index, completion.tokens, finished=bool(completion.finish_reason))
        completions += done
    return [
        Result(
            prompt=text,
            prompt_ids=request.prompt,
            text=continuation(loaded.tokenizer, request.prompt)(completion.tokens),
            ids=tuple(completion.tokens),
            logprobs=tuple(completion.logprobs),
            finish_reason=completion.finish_reason,
        )
        for text, request, completion in zip(texts, requests, completions, strict=True)
    ]


def run(config: GenerateConfig, launch: Launch) -> None:
    """Load the model, continue the prompts; rank 0 prints and writes what came out.

    Raises:
        ValueError: anything the user can fix.
    """
    texts = read_prompts(config.prompts)
    path = config.output.output_json if launch.rank == 0 else None
    if path is not None:
        check_json_path(path)
    params = sampling_params(config.sampling)
    from megatron.inference.checkpoint_model import load_checkpoint_model

    with load_checkpoint_model(config.source, launch) as loaded:
        display = None
        if launch.rank == 0:
            tokenizer = loaded.tokenizer
            follow = [continuation(tokenizer, tokenizer.tokenize(text)) for text in texts]
            display = Display(texts, follow, sys.stdout)
        start = time.perf_counter()
        results = generate_texts(
            loaded,
            texts,
            params=params,
            max_new_tokens=config.sampling.max_new_tokens,
            batch_size=config.prompts.batch_size,
            prefill_chunk_tokens=config.prompts.prefill_chunk_tokens,
            on_token=display.update if display else None,
        )
        seconds = time.perf_counter() - start
    if path is not None:
        write_json(path, results)
    if launch.rank == 0:
        tokens = sum(len(r.ids) for r in results)
        print(
            f"generated {tokens:,} tokens from {len(results)} prompt(s) in {seconds:.1f} s "
            f"({tokens / seconds:,.0f} tokens/s) with {loaded.folder}",
            file=sys.stderr,
        )


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return this process's exit code.

    Args:
        argv: arguments without the program's name.
        environment: of this process, where torchrun gives its rank.
    """
    # All ranks meet the same user errors, as they read the same files: rank 0 speaks for them.
    speaks = environment.get("RANK", "0") == "0"
    return run_entry_point(
        lambda: run(parse_arguments(argv, prog=PROG), Launch.from_environment(environment)),
        prog=PROG,
        claim=lambda text: speaks,
    )


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], os.environ))
