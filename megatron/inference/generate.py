# SPDX-License-Identifier: Apache-2.0
"""Continue prompts with a trained model: `python -m megatron.inference.generate --load DIR ...`.

    python -m megatron.inference.generate --load runs/quickstart/checkpoints \\
        --prompt "The list type" --max-new-tokens 64 --temperature 0.7 --top-p 0.95

One process loads a checkpoint of any layout; `torchrun --nproc-per-node N` with
`--tensor-model-parallel-size N` spreads it. Both write the same text.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron.inference.config import GenerateConfig, Sampling, parse_arguments, read_prompts
from megatron.inference.results import Result, check_json_path, write_json
from megatron.inference.text_stream import Display
from megatron.training.data.tokenizers import continuation
from megatron.training.errors import run_entry_point
from megatron.training.launch import Launch
from megatron.training.standard_streams import run_command

if TYPE_CHECKING:
    from megatron.core.inference.engine import Completion, Request
    from megatron.core.inference.sampling import SamplingParams
    from megatron.inference.checkpoint_model import CheckpointModel

PROG = "python -m megatron.inference.generate"


class OnToken(Protocol):
    """Is told the generated tokens so far of prompt `index`, after every token."""

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
    from megatron.core.inference.engine import stream
    from megatron.core.inference.state_cache import StateCache

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
        ValueError: anything the user can mend.
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
        environment: of this process, where torchrun says which rank it is.
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
