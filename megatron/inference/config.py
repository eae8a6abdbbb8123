# SPDX-License-Identifier: Apache-2.0
"""The options that generate, serve and bench share, as fields of frozen dataclasses.

`megatron.cli.flags` derives the flags and their help from these classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.cli.rank_agreement import StartFacts, option_values, versions

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
    transformer_impl: Literal["auto", "local", "inference_optimized"] = "auto"
    """Implementation of the model: local runs the layers of training, inference_optimized a forward
    pass with fewer operations over the same weights; auto is inference_optimized, or local with
    --batch-invariant."""
    nvls: Literal["auto", "require", "off"] = "auto"
    """Collectives of --sequence-parallel in the optimized forward pass: auto uses
    NVLink SHARP multicast, else loads and stores over NVLink, else torch.distributed, whichever all
    ranks support; require stops if multicast is not available; off uses torch.distributed."""
    nvls_tries: int | None = None
    """How often a collective over NVLink polls for a peer before the run stops and names the peer;
    for debugging, as the host then waits for the device at each step, and a GPU that gives up
    traps; derived: no limit."""
    weights_dtype: Literal["auto", "stored", "bf16", "int8"] = "auto"
    """Weights that a CPU multiplies by: stored, or copies that are made at load, in bf16 or in int8
    with a scale per row. auto makes packed bf16 copies if the weights are bf16, the CPU multiplies
    them faster and there is memory for them, and otherwise uses the stored weights."""
    batch_invariant: bool = False
    """On a CPU, make the results of a text bitwise independent of the batch: other texts, chunked
    prefill, the prefix cache and preemption change neither tokens nor log-probabilities."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for a peer before the run stops, in minutes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one, cuda requires one."""

    @property
    def optimized(self) -> bool:
        """Whether the optimized forward pass runs instead of the layers of training."""
        if self.transformer_impl == "auto":
            return not self.batch_invariant
        return self.transformer_impl == "inference_optimized"


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
    of up to 16 tokens, with or without drafts, for a model on one rank, except with
    --transformer-impl local."""
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


def _check_batch_invariant(source: ModelSource) -> None:
    """Raise ValueError for options that --batch-invariant does not support."""
    if source.optimized:
        raise ValueError(
            "--batch-invariant needs --transformer-impl local: with "
            f"{source.transformer_impl} the sums depend on the batch; drop one of the two "
            "options"
        )
    if source.weights_dtype == "bf16":
        raise ValueError(
            "--batch-invariant cannot be combined with --weights-dtype bf16, whose sums depend on "
            "the batch: use int8 or stored, or drop one of the two options"
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
    if source.batch_invariant:
        _check_batch_invariant(source)
    tries = source.nvls_tries
    for option, is_set in (
        (f"--nvls {source.nvls}", source.nvls != "auto"),
        (f"--nvls-tries {tries}", tries is not None),
    ):
        if is_set and not (source.sequence_parallel and source.optimized):
            raise ValueError(
                f"{option} applies to the collectives of --sequence-parallel in the optimized "
                "forward pass: give --sequence-parallel without --transformer-impl local, or drop "
                "it"
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
    if not source.optimized:
        local = "--batch-invariant" if source.batch_invariant else "--transformer-impl local"
        raise ValueError(f"--enforce-eager has no effect: steps are eager with {local}; drop it")


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


def check(source: ModelSource, inference: Inference, speculation: Speculation) -> None:
    """Raise ValueError for options that are invalid in every program."""
    _check_source(source)
    _check_ranks(source, inference)
    _check_graphs(source, inference)
    _check_speculation(speculation, source, inference)
    _check_inference(inference)
