# SPDX-License-Identifier: Apache-2.0
"""The options of text generation, as fields of frozen dataclasses, and parsing of `--prompt`.

`megatron.cli.flags` derives the flags and their help from these classes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.cli.flags import HelpRequested, parse_command_line
from megatron.cli.rank_agreement import StartFacts, option_values, versions
from megatron.cli.schema import flatten, options
from megatron.cli.yaml_file import write_options
from megatron.core.untrusted_files import read_named

#: Largest prompt file, in bytes.
MAX_PROMPT_BYTES = 64 << 20
#: Variables of a chat template that hold the conversation; requests cannot set them.
TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


_CONTENT = "files that are compared by content, because their names may differ between machines"
_RANK_0_LISTENS = "only rank 0 listens"
_RANK_0_WRITES = "only rank 0 writes"

#: Options that may differ between ranks, and why; all other options must be equal.
MAY_DIFFER: Mapping[str, str] = {
    "tokenizer-model": _CONTENT,
    "prompt": _CONTENT,
    "prompt-file": _CONTENT,
    "host": _RANK_0_LISTENS,
    "port": _RANK_0_LISTENS,
    "api-key-file": _RANK_0_LISTENS,
    "admin-host": _RANK_0_LISTENS,
    "admin-port": _RANK_0_LISTENS,
    "admin-key-file": _RANK_0_LISTENS,
    "output-json": _RANK_0_WRITES,
    "output-jsonl": _RANK_0_WRITES,
}


def start_facts(config: object, *, prompts: Sequence[str] = ()) -> StartFacts:
    """Return the values that must be equal on all ranks, except digests of the model's files.

    Args:
        config: options of the program.
        prompts: prompts of the run.
    """
    digest = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
    values = option_values(config, leave_out=MAY_DIFFER)
    if prompts:
        values["the digest of the prompts"] = digest[:16]
    return StartFacts(values={**values, **versions()})


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Path of the model and its layout over ranks."""

    load: str
    """Model to load: a folder of checkpoints (the latest is loaded), one iter_ folder, or a Hugging
    Face folder; any training layout."""
    tokenizer_model: str | None = None
    """Path of a tokenizer.json, of its folder, of a SentencePiece .model, or, for a model that was
    trained with one, of a vocabulary of tiktoken; derived: the tokenizer of training."""
    tokenizer_hf_no_include_special_tokens: bool | None = None
    """Encode prompts without the special tokens that the tokenizer adds around a text, such as BOS;
    derived: as in training; for a Hugging Face folder as in transformers."""
    tensor_model_parallel_size: int = 1
    """Ranks over which each weight matrix is sharded. Start this number times the pipeline stages
    of processes with torchrun; a multiple starts data-parallel replicas, each with its own engine,
    which share the requests."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages: ranks that each hold a contiguous part of the layers and their cache."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage, in the order of the model: E is the embedding, t a layer, L the head, |
    separates stages, as in Ettt|ttL; derived: equal stages, with the extra layers in the first."""
    expert_model_parallel_size: int = 1
    """Ranks over which the experts of a layer are distributed: ranks of one replica, with
    --expert-tensor-parallel-size below the tensor parallel size, or of several replicas, which then
    run their steps together."""
    expert_tensor_parallel_size: int | None = None
    """Ranks over which each expert's weight matrices are sharded; derived: the tensor parallel
    size."""
    sequence_parallel: bool = False
    """Shard activations along the tokens of a step over the tensor-parallel ranks (sequence
    parallelism). Steps are padded to a multiple of the ranks."""
    transformer_impl: Literal["local", "inference_optimized"] = "local"
    """Implementation of the model: the layers of training, or a forward pass with fused operations
    over the same weights."""
    nvls: Literal["auto", "require", "off"] = "auto"
    """Collectives of --sequence-parallel in --transformer-impl inference_optimized: auto uses
    NVLink SHARP multicast, else loads and stores over NVLink, else torch.distributed, whichever all
    ranks support; require stops if multicast is not available; off uses torch.distributed."""
    nvls_tries: int | None = None
    """How often a collective over NVLink polls for a peer before the run stops and names the peer;
    for debugging, as the host then waits for the device at each step, and a GPU that gives up
    traps; derived: no limit."""
    weights_dtype: Literal["bf16", "int8"] | None = None
    """Run matmuls with low-bit copies of the weights, made at load, on a CPU under
    --transformer-impl inference_optimized: bf16, or int8 with a scale per row; derived: no
    copies."""
    batch_invariant: bool = False
    """On a CPU, make the results of a text bitwise independent of the batch: other texts, chunked
    prefill, the prefix cache and preemption change neither tokens nor log-probabilities."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for a peer before the run stops, in minutes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one, cuda requires one."""


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
class Inference:
    """Sizes and options of the inference engine. They change outputs only by rounding."""

    inference_max_requests: int = 16
    """Maximum number of sequences in a batch; when one ends, the next waiting one starts."""
    inference_max_tokens: int = 2048
    """Maximum number of tokens per step. Longer prompts are prefilled in chunks, which bounds
    activation memory."""
    inference_block_size: int = 16
    """Tokens per block of the cache, a power of two of at least 16."""
    inference_memory_gb: float | None = None
    """Memory of the cache on each rank, for keys, values and states; if it is full, the newest
    sequences wait; derived: enough for --inference-max-requests sequences."""
    no_prefix_caching: bool = False
    """Do not reuse the cache of a prompt for other prompts with the same prefix."""
    async_scheduling: bool = False
    """Schedule a step while the previous step runs. A stop token or stop string is detected one
    step late; the extra token is dropped and counted as wasted. Sequences with penalties wait for
    each of their tokens, and sequences with drafts for the step that verifies the drafts."""
    inference_cuda_graphs: bool = False
    """Run decode steps, with or without drafts, as CUDA graphs: one graph per power of two of
    tokens, up to the tokens of --inference-max-requests sequences; needs a GPU."""
    enforce_eager: bool = False
    """Run every step eagerly. By default a CPU records and replays the operations of decode steps
    of up to 16 tokens, with or without drafts, for a model on one rank under --transformer-impl
    inference_optimized."""
    check_plans: bool = False
    """Compare the schedules of the tensor-parallel ranks before each step, and stop if they differ;
    for debugging, as it makes the host wait for the device."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding: propose draft tokens and verify several drafts in one model step.

    It changes outputs only by rounding.
    """

    speculative_method: Literal["ngram", "draft", "mtp"] | None = None
    """Source of draft tokens: ngram matches the newest tokens earlier in the text and proposes
    their continuation; draft generates with a smaller model; mtp uses the model's layers of
    multi-token prediction, --mtp-num-layers of training; derived: no drafts."""
    num_speculative_tokens: int | None = None
    """Maximum number of draft tokens per sequence and step; fewer while few are accepted; derived:
    4, with mtp the number of MTP layers."""
    speculative_draft_model: str | None = None
    """The smaller model of --speculative-method draft, as for --load, with the same tokenizer. It
    has its own cache with the same number of blocks. It is sharded over the same tensor-parallel
    ranks; with pipeline stages, the first stage holds all of it."""


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


def _check_batch_invariant(source: ModelSource) -> None:
    """Raise ValueError for options that --batch-invariant does not support."""
    if source.transformer_impl != "local":
        raise ValueError(
            "--batch-invariant needs --transformer-impl local: with "
            f"{source.transformer_impl} the sums depend on the batch; drop one of the two "
            "options"
        )
    if source.sequence_parallel or source.tensor_model_parallel_size > 2:
        raise ValueError(
            "--batch-invariant supports sums over at most two ranks, not "
            "--tensor-model-parallel-size "
            f"{source.tensor_model_parallel_size}"
            f"{' with --sequence-parallel' * source.sequence_parallel}: "
            "with more ranks the order of the sum depends on the position in a buffer; use "
            "fewer ranks, or drop it"
        )


def _check_source(source: ModelSource) -> None:
    """Raise ValueError for sizes below 1, or for an option without effect in this layout."""
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "distributed_timeout_minutes",
    ):
        value = getattr(source, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be above 0")
    if (
        source.pipeline_model_parallel_layout is not None
        and source.pipeline_model_parallel_size == 1
    ):
        raise ValueError(
            "--pipeline-model-parallel-layout has no effect without "
            "--pipeline-model-parallel-size above 1: raise that size"
        )
    if source.sequence_parallel and source.tensor_model_parallel_size < 2:
        raise ValueError(
            "--sequence-parallel needs --tensor-model-parallel-size above 1: drop it, or "
            "raise that size"
        )
    optimized = source.transformer_impl == "inference_optimized"
    if source.batch_invariant:
        _check_batch_invariant(source)
    if source.weights_dtype is not None and not optimized:
        raise ValueError(
            f"--weights-dtype {source.weights_dtype} needs --transformer-impl "
            "inference_optimized: give both options, or neither"
        )
    tries = source.nvls_tries
    for option, is_set in (
        (f"--nvls {source.nvls}", source.nvls != "auto"),
        (f"--nvls-tries {tries}", tries is not None),
    ):
        if is_set and not (source.sequence_parallel and optimized):
            raise ValueError(
                f"{option} applies to the collectives of --sequence-parallel with "
                "--transformer-impl inference_optimized: give both options, or drop it"
            )
    if tries is not None and (tries < 1 or source.nvls == "off"):
        raise ValueError(
            f"--nvls-tries is {tries} with --nvls {source.nvls}: give a positive number, and "
            "an --nvls other than off"
        )


def _check_ranks(source: ModelSource, inference: Inference) -> None:
    """Raise ValueError for an option of parallelism that does not fit the layout."""
    if inference.check_plans and source.tensor_model_parallel_size < 2:
        raise ValueError(
            "--check-plans compares ranks: give --tensor-model-parallel-size above 1, or drop it"
        )
    if inference.async_scheduling and source.pipeline_model_parallel_size > 1:
        raise ValueError(
            "--async-scheduling has no effect with --pipeline-model-parallel-size "
            f"{source.pipeline_model_parallel_size}, because the stages keep that many steps "
            "in flight: drop one of the two options"
        )
    if inference.inference_cuda_graphs and source.pipeline_model_parallel_size > 1:
        raise ValueError(
            "--inference-cuda-graphs cannot be combined with --pipeline-model-parallel-size "
            f"{source.pipeline_model_parallel_size}: drop one of the two options"
        )


def _check_graphs(source: ModelSource, inference: Inference) -> None:
    """Raise ValueError for --enforce-eager if steps are eager anyway, or with CUDA graphs."""
    if not inference.enforce_eager:
        return
    if inference.inference_cuda_graphs:
        raise ValueError(
            "--enforce-eager cannot be combined with --inference-cuda-graphs, which records "
            "steps: drop one of the two options"
        )
    ranks = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
    )
    for name in ranks:
        if (getattr(source, name) or 1) > 1:
            raise ValueError(
                f"--enforce-eager has no effect with --{name.replace('_', '-')} "
                f"{getattr(source, name)}: steps of several ranks are always eager; drop it"
            )
    if source.transformer_impl != "inference_optimized":
        raise ValueError(
            "--enforce-eager has no effect: steps are eager with --transformer-impl "
            f"{source.transformer_impl}; drop it"
        )


def _check_speculation(speculation: Speculation, source: ModelSource, inference: Inference) -> None:
    """Raise ValueError for incompatible options of speculative decoding."""
    method, count = speculation.speculative_method, speculation.num_speculative_tokens
    if method is None and (count is not None or speculation.speculative_draft_model is not None):
        name = "num-speculative-tokens" if count is not None else "speculative-draft-model"
        raise ValueError(
            f"--{name} has no effect without --speculative-method: give ngram, draft or mtp"
        )
    if (method == "draft") != (speculation.speculative_draft_model is not None):
        raise ValueError(
            f"--speculative-method {method} "
            + (
                "needs --speculative-draft-model: name a smaller model with the same tokenizer"
                if method == "draft"
                else "takes no --speculative-draft-model: drop it, or use draft"
            )
        )
    if method in ("draft", "mtp") and inference.async_scheduling:
        raise ValueError(
            f"--speculative-method {method} cannot be combined with --async-scheduling: the "
            "draft model needs the tokens of the finished step; use ngram, or drop one of "
            "the two options"
        )
    if count is not None and count < 1:
        raise ValueError(f"--num-speculative-tokens is {count}: it must be above 0")


def _check_inference(inference: Inference) -> None:
    """Raise ValueError for invalid sizes of the engine."""
    for name, value in (
        ("inference-max-requests", inference.inference_max_requests),
        ("inference-max-tokens", inference.inference_max_tokens),
        ("inference-memory-gb", inference.inference_memory_gb),
    ):
        if value is not None and value <= 0:
            raise ValueError(f"--{name} is {value}: it must be above 0")
    size = inference.inference_block_size
    if size < 16 or size & (size - 1):
        raise ValueError(f"--inference-block-size is {size}: use a power of two, at least 16")


def _check(source: ModelSource, inference: Inference, speculation: Speculation) -> None:
    """Raise ValueError for options that are invalid in every program."""
    _check_source(source)
    _check_ranks(source, inference)
    _check_graphs(source, inference)
    _check_speculation(speculation, source, inference)
    _check_inference(inference)


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
        _check(self.source, self.inference, self.speculation)
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


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of the measurement: random tokens of exact lengths."""

    num_requests: int = 64
    """Requests per repeat."""
    input_tokens: int = 32
    """Tokens of each prompt, including the shared prefix."""
    shared_prefix_tokens: int = 0
    """Tokens of a prefix that all prompts share; with the prefix cache it is computed once."""
    min_output_tokens: int = 8
    """Minimum number of tokens that a request generates; lengths are log-uniform."""
    max_output_tokens: int = 128
    """Maximum number of tokens that a request generates."""
    request_rate: float | None = None
    """Mean arrivals per second of a Poisson process (open loop); derived: all requests arrive at
    the start, and --inference-max-requests of them run at a time (closed loop)."""
    warmup: int = 1
    """Warm-up repeats, which are not measured."""
    repeats: int = 3
    """Measured repeats."""
    seed: int = 1234
    """Seed of tokens, lengths and arrivals; all repeats have the same requests."""
    output_json: str | None = None
    """File for all figures as JSON."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One measurement of the inference engine."""

    source: ModelSource
    requests: Load
    inference: Inference
    speculation: Speculation

    def __post_init__(self) -> None:
        _check(self.source, self.inference, self.speculation)
        load = self.requests
        for name, value in (
            ("num-requests", load.num_requests),
            ("input-tokens", load.input_tokens),
            ("min-output-tokens", load.min_output_tokens),
            ("repeats", load.repeats),
            ("request-rate", load.request_rate),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"--{name} is {value}: it must be above 0")
        if load.max_output_tokens < load.min_output_tokens:
            raise ValueError(
                f"--max-output-tokens is {load.max_output_tokens}: it must be at least "
                f"--min-output-tokens {load.min_output_tokens}"
            )
        if not 0 <= load.shared_prefix_tokens < load.input_tokens:
            raise ValueError(
                f"--shared-prefix-tokens is {load.shared_prefix_tokens}: it must be at least "
                f"0 and below --input-tokens {load.input_tokens}"
            )
        tp = self.source.tensor_model_parallel_size
        stages = self.source.pipeline_model_parallel_size
        if load.request_rate is not None and stages > 1:
            raise ValueError(
                "--request-rate cannot be combined with --pipeline-model-parallel-size "
                f"{stages}, whose stages run different steps at the same time: drop one of "
                "the two options"
            )
        if load.request_rate is not None and self.inference.async_scheduling and tp > 1:
            raise ValueError(
                "--request-rate cannot be combined with --async-scheduling on several ranks: "
                "the ranks must agree on the time before each step, while a step is still "
                "running; drop one of the two options"
            )
        if load.warmup < 0:
            raise ValueError(f"--warmup is {load.warmup}: it must not be negative")


@dataclass(frozen=True, kw_only=True)
class Service:
    """Addresses, keys, formats and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen on; an address that other machines reach needs --api-key-file."""
    port: int = 8000
    """Port to listen on; 0 selects a free port and logs it."""
    api_key_file: str | None = None
    """File with the API key, which every route except / and /health requires."""
    served_model_name: str | None = None
    """Name of the model for clients; derived: the name of the folder of --load."""
    chat_template: str | None = None
    """Chat template: a Jinja file, or chatml, llama3 or plain; derived: the template of the
    tokenizer's folder. Without a template there are no chat routes."""
    tool_call_parser: (
        Literal["hermes", "qwen3_coder", "llama3_json", "deepseek_v3", "nemotron"] | None
    ) = None
    """Format of tool calls: hermes is JSON in <tool_call>, also for Qwen2.5 and Qwen3; qwen3_coder
    is XML, also for Nemotron 3; derived: requests with tools are refused."""
    reasoning_parser: Literal["qwen3", "deepseek_r1", "nemotron", "mistral"] | None = None
    """Tags around reasoning: [THINK] for mistral, <think> for the other values; derived: reasoning
    is part of the text."""
    chat_template_kwargs: tuple[str, ...] | None = None
    """Variables of the chat template that requests may set, such as enable_thinking."""
    max_queue: int = 64
    """Maximum number of outputs in the queue, in addition to --inference-max-requests running
    outputs; requests beyond are refused with 429."""
    max_body_mb: float = 8.0
    """Largest request body, in units of 1e6 bytes."""
    max_unsent_tokens: int = 4096
    """Maximum number of unread tokens of a slow client; beyond it, its stream is dropped."""
    body_timeout_seconds: float = 30.0
    """Time for a request's header, and then for its body, to arrive."""
    request_timeout_seconds: float = 600.0
    """Time for a response, including its time in the queue."""
    drain_timeout_seconds: float = 30.0
    """Time for running requests to finish after SIGTERM before they are aborted."""
    admin_port: int | None = None
    """Port for administration: pause, sleep, replace weights, profile; 0 selects a free port;
    derived: no administration."""
    admin_host: str = "127.0.0.1"
    """Address to listen on for administration."""
    admin_key_file: str | None = None
    """File with the admin key, which --admin-port requires."""
    log_format: Literal["text", "json"] = "text"
    """Format of the HTTP process's log on stderr, one line per response: text, or a JSON object
    with the request id."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """One server."""

    source: ModelSource
    service: Service
    inference: Inference
    speculation: Speculation

    def __post_init__(self) -> None:
        _check(self.source, self.inference, self.speculation)
        service = self.service
        for variable in service.chat_template_kwargs or ():
            if not variable.isidentifier() or variable in TEMPLATE_ARGUMENTS:
                raise ValueError(
                    f"--chat-template-kwargs {variable}: requests may not set this variable"
                )
        for name, value in (
            ("max-body-mb", service.max_body_mb),
            ("max-unsent-tokens", service.max_unsent_tokens),
            ("body-timeout-seconds", service.body_timeout_seconds),
            ("request-timeout-seconds", service.request_timeout_seconds),
            ("drain-timeout-seconds", service.drain_timeout_seconds),
        ):
            if value <= 0:
                raise ValueError(f"--{name} is {value}: it must be above 0")
        if service.max_queue < 0:
            raise ValueError(f"--max-queue is {service.max_queue}: it must not be negative")
        for name, port in (("port", service.port), ("admin-port", service.admin_port or 0)):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"--{name} is {port}: use 0 to 65535")
        if service.admin_port is None and service.admin_key_file is not None:
            raise ValueError("--admin-key-file needs --admin-port: give --admin-port as well")


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
