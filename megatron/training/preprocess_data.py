# SPDX-License-Identifier: Apache-2.0
"""Encode text files into the `.bin/.idx` token files that training reads.

    python -m megatron.training.preprocess_data --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type hf --tokenizer-model tokenizer.json --append-eod

The result depends only on the inputs and the options, not on the number of workers or on how often
the program was killed and resumed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.cli.errors import run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.standard_streams import run_command
from megatron.cli.tokenizers import Tokenizer, tiktoken_record
from megatron.core.datasets.indexed_dataset import Written
from megatron.training.data.documents import (
    BLOCK_BYTES,
    Inputs,
    Kind,
    Tally,
    find_inputs,
    read_blocks,
)
from megatron.training.data.encoder import (
    Encoder,
    PreprocessConfig,
    WorkerLost,
    encode_in_order,
)
from megatron.training.data.journaled_output import COMMIT_BYTES, Output, journal_path
from megatron.training.data.progress_display import Report, show_progress, silent

__all__ = ["PreprocessConfig", "PreprocessResult", "preprocess"]

PROG = "python -m megatron.training.preprocess_data"
#: Options that do not change the token files.
_RESULT_NEUTRAL = (
    "input",
    "output_prefix",
    "workers",
    "resume",
    "overwrite",
    "tokenizer_model",
    "merge_file",
    "tokenizer_hf_no_include_special_tokens",  # compared as the special tokens it leaves
    "tiktoken",  # part of the fingerprint
)


@dataclass(frozen=True, kw_only=True)
class PreprocessResult:
    """The token files of one prefix, as described in `<prefix>.json`.

    Args:
        kind: "text", or "chat" for conversations with a mask file.
        tokenizer: type, path, fingerprint, vocab_size and eod of the tokenizer, and the special
            tokens that it adds around a text; a chat template adds its own to conversations.
        dtype: token dtype of the .bin.
        append_eod: whether every document ends with eod.
        documents: number of documents.
        tokens: number of tokens, end-of-document tokens included.
        rejected: number of rejected input records by reason.
        examples: location of the first rejected record by reason.
        chat_template: fingerprint of the chat template.
        made_from: digest of the options and inputs.
    """

    kind: str = "text"
    tokenizer: Mapping[str, Any]
    dtype: str
    append_eod: bool
    documents: int
    tokens: int
    rejected: Mapping[str, int]
    examples: Mapping[str, str]
    chat_template: str | None = None
    made_from: str | None = None

    def describe_rejected(self) -> str:
        """Return one line about rejected records; empty without any."""
        tally = Tally(examples=dict(self.examples))
        tally.rejected.update(self.rejected)
        return tally.describe_rejected()


def preprocess(
    config: PreprocessConfig,
    *,
    tokenizer: Tokenizer | None = None,
    inputs: Inputs | None = None,
    report: Report = silent,
    commit_bytes: int = COMMIT_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> dict[str, PreprocessResult]:
    """Encode all documents of the input files in order.

    Workers are new processes that import the caller's main module: a script that uses several
    workers must call this under `if __name__ == "__main__"`.

    Args:
        config: files and options.
        tokenizer: encodes in this process alone; None builds the tokenizer of the options.
        inputs: the input files, if already listed.
        report: called after every block; never if there is nothing left to do.
        commit_bytes: input bytes between commits.
        block_bytes: input bytes encoded at a time.

    Returns:
        The written files by prefix; token files before the mask files.

    Raises:
        ValueError: a file is missing or unreadable, the output exists, no document is left, or the
            tokenizer or template lacks a token. Nothing is written then.
        OSError: the output cannot be written. Committed output is kept, so that the call can be
            resumed; the same holds for WorkerLost.
    """
    inputs = find_inputs(config.input) if inputs is None else inputs
    if len(config.keys) > 1 or config.chat:
        _refuse_plain_text(inputs, config)
    encoder = Encoder(config, tokenizer=tokenizer)
    prefix = Path(config.output_prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    header = _header(config, encoder, inputs)
    output = Output(
        prefix,
        encoder.streams,
        header=header,
        resume=config.resume,
        overwrite=config.overwrite,
        shuffle_seed=config.shuffle_seed,
        commit_bytes=commit_bytes,
    )
    try:
        if not output.complete:
            blocks = read_blocks(
                inputs.files,
                columns=config.keys,
                start=output.position,
                max_document_bytes=config.max_document_bytes,
                block_bytes=block_bytes,
            )
            workers = config.num_workers if tokenizer is None else 1
            with closing(encode_in_order(blocks, encoder, workers=workers)) as encoded:
                for encoded_documents in encoded:
                    output.add(encoded_documents)
                    report(
                        read_bytes=output.tally.read_bytes,
                        documents=output.tally.documents,
                        tokens=output.written[0].tokens,
                    )
            if output.tally.documents == 0:
                raise ValueError(
                    f"no document in {', '.join(config.input)}; "
                    f"{output.tally.describe_rejected() or 'empty'}"
                )
            output.finish(_descriptions(encoder, output))
        published = output.publish()
    except BaseException as error:
        output.stop(keep=isinstance(error, WorkerLost) or not isinstance(error, ValueError))
        raise
    prefixes = [f"{prefix}{stream.suffix}" for stream in encoder.streams]
    return {
        p: PreprocessResult(**d) for p, d in zip(prefixes, published, strict=True) if d is not None
    }


def _refuse_plain_text(inputs: Inputs, config: PreprocessConfig) -> None:
    plain = [file.path for file in inputs.files if file.kind is Kind.TEXT]
    if plain:
        option = "--chat" if config.chat else f"--json-keys {' '.join(config.keys)}"
        raise ValueError(f"{plain[0]} is plain text, without keys: drop it or {option}")


def _header(config: PreprocessConfig, encoder: Encoder, inputs: Inputs) -> dict[str, Any]:
    """Return everything the result depends on, for comparison when a run resumes."""
    options = {name: v for name, v in asdict(config).items() if name not in _RESULT_NEUTRAL}
    special = encoder.tokenizer.special_tokens
    options["tokenizer_type"] = config.kind
    return {
        **{f"--{name.replace('_', '-')}": value for name, value in options.items()},
        "--chat-template": encoder.template.fingerprint if encoder.template else None,
        "the tokenizer": encoder.tokenizer.fingerprint,
        "the end-of-document token": encoder.tokenizer.eod,
        # None also for files written before this entry existed, when no special tokens were added.
        "what --tokenizer-hf-no-include-special-tokens leaves out": (
            str(special) if special and not config.chat else None
        ),
        **{f"the input {f.path}": f"{f.size} bytes of {f.modified_ns}" for f in inputs.files},
        "the list of inputs": [file.path for file in inputs.files],
    }


def _descriptions(encoder: Encoder, output: Output) -> list[dict[str, Any] | None]:
    """Return the content of each stream's `<prefix>.json`; None for masks."""
    config, tokenizer, tally = encoder.config, encoder.tokenizer, output.tally

    def describe(written: Written, dtype: str) -> dict[str, Any]:
        return asdict(
            PreprocessResult(
                kind="chat" if config.chat else "text",
                tokenizer={
                    "type": config.kind,
                    "model": _resolved(config.tokenizer_model),
                    "fingerprint": tokenizer.fingerprint,
                    "vocab_size": tokenizer.vocab_size,
                    "eod": tokenizer.eod,
                    "special_tokens": tokenizer.special_tokens.to_json(),
                    **tiktoken_record(tokenizer),
                },
                dtype=dtype,
                append_eod=config.append_eod,
                documents=written.documents,
                tokens=written.tokens,
                rejected=dict(tally.rejected),
                examples=tally.examples,
                chat_template=encoder.template.fingerprint if encoder.template else None,
                made_from=output.made_from,
            )
        )

    return [
        describe(written, str(stream.dtype)) if stream.has_description else None
        for written, stream in zip(output.written, encoder.streams, strict=True)
    ]


def _warn_of_joined_documents(config: PreprocessConfig) -> None:
    if config.kind != "null":
        print(
            "without --append-eod no token separates documents: give it, "
            "unless the texts end with one",
            flush=True,
        )


def _resolved(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _main(argv: Sequence[str]) -> None:
    command = parse_command_line(
        PreprocessConfig,
        argv,
        prog=PROG,
        description="Encode text files into the .bin/.idx token files that training reads.",
    )
    config = command.config
    if config.workers is not None:
        # The tokenizer library reads it when it starts its threads, if it runs in this process.
        os.environ["RAYON_NUM_THREADS"] = str(config.workers)
    inputs = find_inputs(config.input)
    if inputs.left_out:
        print(inputs.describe_left_out(), flush=True)
    begin, encoded = time.monotonic(), False
    resuming = journal_path(config.output_prefix).exists()
    try:
        with show_progress(inputs.total_bytes, sys.stdout) as show:

            def report(*, read_bytes: int, documents: int, tokens: int | None = None) -> None:
                nonlocal encoded
                if not encoded and not config.append_eod and not config.chat:
                    _warn_of_joined_documents(config)
                encoded = True
                show(read_bytes=read_bytes, documents=documents, tokens=tokens)

            results = preprocess(config, inputs=inputs, report=report)
    except OSError as error:
        fix = (
            "finished work is kept: free space and continue with --resume"
            if journal_path(config.output_prefix).exists()
            else "nothing was written: give --output-prefix a writable folder with enough space"
        )
        raise ValueError(
            f"{error.filename or config.output_prefix}: {error.strerror}; {fix}"
        ) from None
    except KeyboardInterrupt:
        if journal_path(config.output_prefix).exists():
            print("finished work is kept: continue with --resume", file=sys.stderr, flush=True)
        raise
    seconds = time.monotonic() - begin
    if not encoded and not resuming:
        print(f"{', '.join(results)}: finished by an earlier run; nothing left to do")
        return
    rejected = next(iter(results.values())).describe_rejected()
    if rejected:
        print(rejected, flush=True)
    for prefix, result in results.items():
        print(
            f"wrote {prefix}.bin and .idx: {result.documents:,} documents, {result.tokens:,} "
            f"tokens in {seconds:.1f} s ({inputs.total_bytes / 1e6 / seconds:.1f} MB/s)"
        )


if __name__ == "__main__":
    run_command(lambda: run_entry_point(lambda: _main(sys.argv[1:]), prog=PROG))
