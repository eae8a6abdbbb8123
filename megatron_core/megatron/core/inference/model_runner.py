# SPDX-License-Identifier: Apache-2.0
"""`ModelRunner`: from a `SchedulerOutput` to sampled tokens: inputs, forward, graphs, drafts.

`launch` copies the arrays of a step to the device in one transfer, runs the model on the packed
tokens [t, 1, h], and samples one token for each sequence whose tokens are all computed. `finish`
waits for the result. Between both calls the step is in flight, and further steps may be launched.

With pipeline parallelism the last stage samples and sends the tokens to the other stages
(`stages`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron.core.comm.collectives import Pending
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.layout import PagedRows
from megatron.core.device import Recorder, Work, WorkQueue, pin, runs_ahead, to_host
from megatron.core.inference.cache import EngineConfig, PagedCache
from megatron.core.inference.decode_graphs import DecodeGraphs, DecodeInputs
from megatron.core.inference.request_state import (
    OutputState,
    PromptLogprobs,
    SampledSequence,
    SchedulerOutput,
    SequenceState,
    SharedStep,
)
from megatron.core.inference.sampling import Chosen, Sampled, SampleRow, sample, verified
from megatron.core.inference.speculation import ComputedStep, Proposer
from megatron.core.inference.stages import (
    PipelineGroups,
    StageLink,
    StepResult,
    pack_results,
    unpack_results,
)
from megatron.core.moe.dispatch import MAX_PADDED_ROWS
from megatron.core.ops.paged_attention import PagedBatch
from megatron.core.ops.sampling.cpu import most_probable, token_ranks
from megatron.core.ops.sequences import Sequences
from megatron.core.process_groups import Group
from megatron.core.transformer import CacheShapes

#: Maps the layout, the hidden states and the sampled tokens of a step to drafts of the next step.
_Predict = Callable[[SequenceLayout, Tensor, Sampled | None], Sequence[Sequence[int]]]

#: Tokens per chunk of prompt log-probabilities. It bounds the logits to [256, V] fp32.
LOGPROB_CHUNK_TOKENS = 256


class Head(Protocol):
    """Output head, for example `megatron.core.tensor_parallel.VocabParallelHead`."""

    def gathered(self, hidden: Tensor) -> Tensor:
        """All-gather the hidden states of sequence-parallel ranks to [s, b, h]."""
        ...

    def project(self, hidden: Tensor) -> Tensor:
        """Map hidden states [s, b, h] to this rank's logits [s, b, V/tp]."""
        ...

    def whole(self, logits: Tensor) -> Tensor:
        """All-gather logits to fp32 [s, b, V], equal on all ranks, without padding columns."""
        ...

    def write_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write `whole(project(hidden))` to `out` [s, b, V] and return `out`."""
        ...


class LanguageModel(Protocol):
    """Model interface of the engine, for example `megatron.core.models.gpt.GPTModel`.

    With pipeline parallelism it is the stage of this rank; only the last stage needs `head`.

    Attributes:
        vocab_size: vocabulary size without padding.
        max_sequence_length: longest sequence in tokens; None means no limit.
        device: device of the weights.
    """

    vocab_size: int
    max_sequence_length: int | None
    device: torch.device

    @property
    def head(self) -> Head:
        """Output head."""
        ...

    @property
    def cache_shapes(self) -> CacheShapes:
        """Shapes of the cache entries of this rank's layers."""
        ...

    def __call__(
        self,
        tokens: Tensor,
        *,
        layout: SequenceLayout,
        cache: PagedCache,
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states [t, 1, h] of packed tokens [1, t].

        With sequence parallelism the result is the shard of this rank.

        Args:
            tokens: scheduled tokens of several sequences.
            layout: positions; `layout.paged` has the block tables and cache slots.
            cache: read for earlier tokens, and written for these tokens.
            hidden_states: output of the previous pipeline stage; None on the first stage.
        """
        ...

    def boundary_shape(self, tokens: Tensor) -> Sequence[int]:
        """Return the shape of the hidden states that pipeline stages exchange for tokens [1, t]."""
        ...

    def join_experts(self, max_tokens: int) -> None:
        """Run the expert collectives of a step in which this data-parallel rank has no tokens.

        Needed with `EngineFeatures.expert_peers`.

        Args:
            max_tokens: largest number of scheduled tokens on any rank.
        """
        ...

    def weights_replaced(self) -> None:
        """Recompute everything that is derived from the weights."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineFeatures:
    """Optional engine features: speculation, pipeline stages, graphs, plan checks, shared experts.

    Args:
        proposer: source of draft tokens; None disables speculative decoding.
        pipeline: pipeline stages, which construct their engines together; None for one stage.
        make_recorder: returns a graph recorder for decode steps, `CudaRecorder` on a GPU or
            `CpuGraph` on a CPU; None runs all steps eagerly.
        check_plans: group of ranks that compare their schedules before each step; None disables
            the check.
        expert_peers: data-parallel ranks that share experts, as a host group
            (`ProcessGroupCollection.host_group`). They call `step` equally often; a rank without
            work joins the expert collectives. None if each replica has all experts.
    """

    proposer: Proposer | None = None
    pipeline: PipelineGroups | None = None
    make_recorder: Callable[[], Recorder] | None = None
    check_plans: Group | None = None
    expert_peers: Group | None = None

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError for incompatible features."""
        stages = 1 if self.pipeline is None else self.pipeline.stages.size
        count = config.num_speculative_tokens
        if config.asynchronous and stages > 1:
            raise ValueError(
                f"a pipeline of {stages} stages already keeps that many steps in flight: "
                "leave asynchronous scheduling out"
            )
        if self.proposer is not None and self.proposer.stage != "every" and config.asynchronous:
            raise ValueError(
                f"num-speculative-tokens is {count} with asynchronous steps: a draft model "
                "needs the tokens of the finished step: use n-grams, or drop one of the two"
            )
        if self.make_recorder is not None and stages > 1:
            raise ValueError(
                f"a recorded step cannot communicate with the {stages} stages of a pipeline: "
                "drop make_recorder or the stages"
            )
        if count < 0 or (count > 0) != (self.proposer is not None):
            preposition = "without" if self.proposer is None else "with"
            raise ValueError(
                f"num-speculative-tokens is {count} {preposition} a proposer of drafts: give "
                "a positive number and a proposer, or neither"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInFlight:
    """A step that the device computes; `ModelRunner.finish` waits for it.

    Args:
        scheduler_output: schedule of the step.
        seqs: sequences that get a token.
        num_logits: number of sampled positions, drafts included.
        prompt_logprobs: prompt tokens with log-probabilities.
        num_top: reported alternatives per sampled token.
        work: handle of the computation.
    """

    scheduler_output: SchedulerOutput
    seqs: tuple[SequenceState, ...]
    num_logits: int
    prompt_logprobs: list[PromptLogprobs]
    num_top: int
    work: Work[StepResult]


class FinishedStep(NamedTuple):
    """Result of a step on the host.

    Args:
        chosen: verified tokens of each sampled sequence.
        prompt_logprobs: fp64 values of each entry of `StepInFlight.prompt_logprobs`.
        drafts: predicted drafts of each sampled sequence; empty without prediction.
    """

    chosen: Sequence[Chosen]
    prompt_logprobs: Sequence[Tensor]
    drafts: Sequence[Sequence[int]]


class ModelRunner:
    """Run scheduled steps on the model.

    Args:
        model: the model; with pipeline parallelism the stage of this rank.
        config: config of the engine.
        cache: KV pages and recurrent states.
        link: exchanges data with the other pipeline stages.
        features: optional engine features.

    Attributes:
        model: the model, which may be replaced between two steps.
        graphs: graph runner of decode steps; None runs all steps eagerly.
        num_predicted: largest number of drafts per sequence that a step predicts.
        model_seconds: seconds in the model, drafting and sampling, without waiting for other
            pipeline stages.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        cache: PagedCache,
        link: StageLink,
        features: EngineFeatures,
    ) -> None:
        self.model, self.config, self.cache, self.link = model, config, cache, link
        self.proposer, self._check_plans = features.proposer, features.check_plans
        self.vocab_size, self._device, self.model_seconds = model.vocab_size, cache.device, 0.0
        self._runs_ahead = runs_ahead(self._device)
        predicts = self.proposer is not None and self.proposer.stage == "last"
        self.num_predicted = config.num_speculative_tokens if predicts else 0
        self._queue = WorkQueue(self._device, in_thread=config.asynchronous)
        self.graphs: DecodeGraphs | None = None
        if features.make_recorder is not None:
            self.graphs = self._make_graphs(
                features.make_recorder, shared=features.expert_peers is not None
            )
        # Newest token of each sequence by row, on the device. A step that was scheduled before its
        # predecessor was sampled reads its input tokens from here, so the host need not wait.
        self._newest = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self._device)

    def _make_graphs(self, make_recorder: Callable[[], Recorder], *, shared: bool) -> DecodeGraphs:
        """Return the graph runner of decode steps."""
        drafts = 0 if self.cache.shapes.states else self.config.num_speculative_tokens
        # A graph computes each draft as a row of its own.
        num_rows = self.config.max_num_seqs * (1 + drafts)
        max_context = self.cache.num_blocks * self.config.block_size
        limit = MAX_PADDED_ROWS if shared else num_rows
        max_tokens = min(self.config.max_num_batched_tokens, limit)
        return DecodeGraphs(
            self._decode_forward,
            make_recorder,
            cache=self.cache,
            vocab_size=self.vocab_size,
            # Above MOST_PADDED tokens the expert dispatch reads counts on the host, which a graph
            # cannot record.
            max_rows=min(num_rows, max_tokens),
            row_multiple=self.config.token_multiple,
            max_context=min(max_context, self.config.max_model_len or max_context),
            shares_experts=shared,
        )

    def launch(
        self,
        scheduler_output: SchedulerOutput,
        outputs: Mapping[SequenceState, OutputState],
        *,
        shared: SharedStep | None = None,
    ) -> StepInFlight:
        """Launch a step: the model, sampling, and the copies to the host.

        Args:
            scheduler_output: schedule of the step.
            outputs: outputs of the scheduled sequences.
            shared: agreement of the ranks that share experts; None without them.
        """
        seqs = tuple(scheduler_output.sequences[n] for n in scheduler_output.sampled)
        sample_rows = [
            outputs[seq].sample_row(seq.draft_tokens[:num_drafts])
            for seq in seqs
            for num_drafts in range(len(seq.draft_tokens) + 1)
        ]
        num_top = max((row.params.logprobs or 0 for row in sample_rows), default=0)
        num_top = min(num_top, self.vocab_size)
        prompt_logprobs: list[PromptLogprobs] = []
        # Most steps have no such sequence.
        if any(seq.needs_prompt_logits for seq in scheduler_output.sequences):
            prompt_logprobs = self._plan_prompt_logprobs(scheduler_output, outputs)
        predict = None
        if self.num_predicted and self.link.is_last:
            sampled = [outputs[seq].sampled_sequence() for seq in seqs]
            next_tokens = scheduler_output.next_tokens(self.num_predicted)
            predict = functools.partial(self._predict, scheduler_output, next_tokens, sampled)
        # The size of the result message is known now, so that other stages can post the receive
        # before the last stage sends: 3 values and 2 k alternatives per sampled position.
        num_values = len(sample_rows) * (3 + 2 * num_top)
        num_values += sum(entry.num_values for entry in prompt_logprobs)
        num_values += len(seqs) * self.num_predicted
        start, idle = time.perf_counter(), self.link.idle_seconds
        work = self._queue.submit(
            lambda: self._compute(
                scheduler_output, sample_rows, prompt_logprobs, predict, num_values, shared
            )
        )
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        return StepInFlight(
            scheduler_output=scheduler_output,
            seqs=seqs,
            num_logits=len(sample_rows),
            prompt_logprobs=prompt_logprobs,
            num_top=num_top,
            work=work,
        )

    def finish(self, step: StepInFlight) -> FinishedStep:
        """Wait for the oldest step in flight; return its result."""
        start, idle = time.perf_counter(), self.link.idle_seconds
        result = step.work.result()
        # Sends read the step's buffers, so they must complete before the step is dropped.
        for pending in result.sends:
            self.link.wait(pending)
        sampled, logprobs, drafts = result.sampled, result.prompt_logprobs, result.drafts
        if result.results is not None:
            sampled, logprobs, drafts = unpack_results(
                self.link.wait(result.results).cpu(),
                num_rows=step.num_logits,
                num_top=step.num_top,
                prompt_sizes=[entry.num_values for entry in step.prompt_logprobs],
                drafts_shape=(len(step.seqs), self.num_predicted),
            )
        scheduler_output = step.scheduler_output
        drafted = [scheduler_output.draft_tokens[n] for n in scheduler_output.sampled]
        chosen = [] if sampled is None else verified(sampled, drafted)
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        return FinishedStep(chosen, logprobs, drafts)

    def propose(self, max_drafts: Sequence[tuple[OutputState, int]]) -> list[Sequence[int]]:
        """Return drafts for (output, largest number of drafts) pairs."""
        assert self.proposer is not None
        start = time.perf_counter()
        # The proposer also guesses pending tokens; the drafts are the tokens after the guesses.
        pending = [output.seq.num_pending_tokens for output, _ in max_drafts]
        contexts = [
            output.context(num_pending + count)
            for (output, count), num_pending in zip(max_drafts, pending, strict=True)
        ]
        proposed, idle = self.proposer.propose(contexts), self.link.idle_seconds
        if self.proposer.stage == "first":
            max_count = max(context.max_drafts for context in contexts)
            proposed = self.link.broadcast_drafts(proposed, max_count)
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        return [
            output.valid_prefix(drafts)[num_pending:]
            for (output, _), num_pending, drafts in zip(max_drafts, pending, proposed, strict=True)
        ]

    def submit_join(self, shared: SharedStep) -> Work[None]:
        """Launch the experts of this rank in a step of the other replicas."""
        return self._queue.submit(functools.partial(self._join, shared))

    @torch.no_grad()
    def _join(self, shared: SharedStep) -> None:
        if self.graphs is None or shared.eager:
            self.model.join_experts(shared.max_tokens)
        else:
            self.graphs.join(shared.max_tokens)

    # Not inference_mode: weight-gather buffers allocated there would be inference tensors, which
    # autograd rejects when training uses them.
    @torch.no_grad()
    def _compute(
        self,
        scheduler_output: SchedulerOutput,
        sample_rows: Sequence[SampleRow],
        prompt_logprobs: Sequence[PromptLogprobs],
        predict: _Predict | None,
        num_values: int,
        shared: SharedStep | None,
    ) -> StepResult:
        """Compute a step.

        It may run in another thread while the host schedules the next step, so it must not read
        sequences, outputs or the scheduler.

        Args:
            scheduler_output: schedule of the step.
            sample_rows: sampling inputs of the sampled positions.
            prompt_logprobs: prompt tokens with log-probabilities.
            predict: predicts drafts; None without a predicting proposer.
            num_values: number of values in the result message of the last stage.
            shared: agreement of the ranks that share experts; None without them.
        """
        if self._check_plans is not None:
            self.link.require_same_plan(scheduler_output, self._check_plans)
        # Before the model: the copies read the states that the previous step left.
        if scheduler_output.state_copies:
            self.cache.states.copy(scheduler_output.state_copies)
        if self.graphs is not None and self.graphs.prepare(scheduler_output, shared):
            hidden, logits = self.graphs(scheduler_output, shared)
            # A graph returns the logits of all tokens, padding included.
            if len(logits) != len(scheduler_output.logits_indices):
                logits = self._select_rows(logits, scheduler_output.logits_indices)
            sampled = sample(logits, sample_rows)
            if self.config.asynchronous:
                self._store_newest(scheduler_output, sampled.tokens)
            host_sampled, drafts = sampled.on_host() if self._runs_ahead else sampled, []
            if predict is not None:
                drafts = predict(self._prepare_inputs(scheduler_output)[1], hidden, sampled)
            return StepResult(sampled=host_sampled, drafts=drafts)
        results = None
        # Post the receive first: results have their own communicator, and the last stage must not
        # block on a receiver that is still computing.
        if num_values and not self.link.is_last:
            results = self.link.expect_results(num_values)
        tokens, layout = self._prepare_inputs(scheduler_output, shared)
        hidden = self._forward(tokens, layout)
        if not self.link.is_last:
            return StepResult(results=results, sends=self.link.send_hidden(hidden))
        device_logprobs = [
            self._compute_prompt_logprobs(entry, hidden) for entry in prompt_logprobs
        ]
        sampled, host_sampled, drafts = None, None, []
        if sample_rows:
            # Where all tokens are sampled, as in pure decode, no row is copied.
            rows = hidden
            if len(hidden) != len(scheduler_output.logits_indices):
                rows = self._select_rows(hidden, scheduler_output.logits_indices)
            sampled = sample(self.logits(rows), sample_rows)
            if self.config.asynchronous:
                self._store_newest(scheduler_output, sampled.tokens)
            # The copy to the host overlaps with the prediction of drafts.
            host_sampled = sampled.on_host() if self._runs_ahead else sampled
        if predict is not None:
            drafts = predict(layout, hidden, sampled)
        sends: Sequence[Pending] = ()
        if num_values and self.link.count > 1:
            values = pack_results(sampled, device_logprobs, drafts, max_drafts=self.num_predicted)
            sends = self.link.send_results(values)
        host_logprobs = [to_host(values) for values in device_logprobs]
        return StepResult(
            sampled=host_sampled, prompt_logprobs=host_logprobs, drafts=drafts, sends=sends
        )

    def _predict(
        self,
        scheduler_output: SchedulerOutput,
        next_tokens: Sequence[Sequence[int]],
        seqs: Sequence[SampledSequence],
        layout: SequenceLayout,
        hidden: Tensor,
        sampled: Sampled | None,
    ) -> Sequence[Sequence[int]]:
        """Return the proposer's drafts after a step. The host waits for the sampled tokens."""
        assert self.proposer is not None
        drafted = [scheduler_output.draft_tokens[n] for n in scheduler_output.sampled]
        chosen = [] if sampled is None else verified(sampled, drafted)
        step = ComputedStep(
            scheduler_output=scheduler_output,
            layout=layout,
            hidden=hidden,
            cache=self.cache,
            logits=self.logits,
            next_tokens=next_tokens,
            seqs=seqs,
            chosen=[choice.tokens for choice in chosen],
            accepted=[choice.accepted for choice in chosen],
            max_drafts=[
                0 if choice.error else seq.max_drafts_after(choice.tokens)
                for choice, seq in zip(chosen, seqs, strict=True)
            ],
        )
        return self.proposer.predict(step)

    def _store_newest(self, scheduler_output: SchedulerOutput, tokens: Tensor) -> None:
        """Store the sampled tokens for steps that are scheduled already."""
        # No step is scheduled after drafts, so any of the sampled tokens may be stored.
        if any(scheduler_output.draft_tokens):
            counts = [1 + len(scheduler_output.draft_tokens[n]) for n in scheduler_output.sampled]
            tokens = tokens[self._index_tensor(np.cumsum(counts) - 1)]
        self._newest[self._index_tensor(np.array(scheduler_output.sampled_rows))] = tokens

    def _fill_pending(self, tokens: Tensor) -> Tensor:
        """Replace pending tokens, encoded as -1 - row in int64 [t], with the sampled tokens."""
        # The steps run in order on one stream: the previous step has written `_newest`.
        return tokens.where(tokens >= 0, self._newest[(-1 - tokens).clamp_(min=0)])

    def _decode_forward(self, inputs: DecodeInputs, logits: Tensor) -> Tensor:
        """Forward pass of a recorded step: write fp32 [b, V] to `logits`, return hidden states
        [b, 1, h]."""
        tokens = inputs.tokens.long()
        tokens = self._fill_pending(tokens) if self.config.asynchronous else tokens
        layout = SequenceLayout(inputs.positions.long(), paged=inputs.paged)
        hidden = self._forward(tokens, layout)
        self.model.head.write_logits(hidden, logits[:, None])
        return hidden

    def _forward(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Run this stage on tokens int64 [t]; the last stage returns gathered hidden states
        [t, 1, h]."""
        tokens, inputs = tokens.unsqueeze(0), {}
        if not self.link.is_first:
            shape = self.model.boundary_shape(tokens)
            inputs["hidden_states"] = self.link.receive_hidden(shape)
        hidden = self.model(tokens, layout=layout, cache=self.cache, **inputs)
        return self.model.head.gathered(hidden) if self.link.is_last else hidden

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, shared: SharedStep | None = None
    ) -> tuple[Tensor, SequenceLayout]:
        """Return the scheduled tokens, int64 [t] on the device, and their layout."""
        int64_arrays = (
            scheduler_output.tokens,
            scheduler_output.positions,
            scheduler_output.state_slots,
            *scheduler_output.slot_mappings,
        )
        int32_arrays = (
            scheduler_output.query_bounds,
            scheduler_output.context_lengths,
            *scheduler_output.block_tables,
        )
        on_device = self._copy_to_device(int64_arrays, int32_arrays)
        count = len(int64_arrays)
        tokens, positions, states, *slots = on_device[:count]
        bounds, contexts, *tables = on_device[count:]
        if scheduler_output.tokens.min() < 0:
            tokens = self._fill_pending(tokens)
        decode = scheduler_output.decode_rows + scheduler_output.padding
        prefill = None
        if scheduler_output.decode_rows < len(scheduler_output.sequences):
            ends = (scheduler_output.query_bounds[decode:] - decode).tolist()
            prefill = Sequences(ends, device=self._device)
        # The rows of the first group refer to the rows of the second, so build them last.
        paged: PagedRows | None = None
        for table, group_slots in zip(reversed(tables), reversed(slots), strict=True):
            paged = PagedRows(
                batch=PagedBatch(
                    block_table=table,
                    query_bounds=bounds,
                    context_lengths=contexts,
                    max_query=max(scheduler_output.num_scheduled_tokens),
                    max_context=int(scheduler_output.context_lengths.max()),
                    cpu_dtype=self.cache.shapes.cpu_dtype,
                ),
                slot_mapping=group_slots,
                state_slots=states,
                decode_rows=decode,
                prefill=prefill,
                most_tokens=None if shared is None else shared.max_tokens,
                windowed=paged,
            )
        return tokens, SequenceLayout(positions, paged=paged)

    def _copy_to_device(
        self, int64_arrays: Sequence[np.ndarray], int32_arrays: Sequence[np.ndarray]
    ) -> tuple[Tensor, ...]:
        """Copy integer arrays to the device in one transfer.

        Args:
            int64_arrays: arrays to return as int64 tensors.
            int32_arrays: arrays to return as int32 tensors.
        """
        # int64 first, so that the int64 views start at an aligned offset.
        flat = np.concatenate([array.reshape(-1) for array in int64_arrays]).astype(np.int64)
        flat = np.concatenate([flat.view(np.int32), *(array.reshape(-1) for array in int32_arrays)])
        # Pinned: from pageable memory a non-blocking copy would make the host wait.
        on_device = pin(torch.from_numpy(flat), self._device).to(self._device, non_blocking=True)
        sizes = [2 * array.size for array in int64_arrays] + [array.size for array in int32_arrays]
        tensors = on_device.split_with_sizes(sizes)
        int32_tensors = tensors[len(int64_arrays) :]
        return (
            *(tensor.view(torch.int64) for tensor in tensors[: len(int64_arrays)]),
            *(x.view(a.shape) for x, a in zip(int32_tensors, int32_arrays, strict=True)),
        )

    def _select_rows(self, hidden: Tensor, indices: np.ndarray) -> Tensor:
        """Return rows [n, 1, h] of `hidden`."""
        return hidden.index_select(0, self._index_tensor(indices))

    def _index_tensor(self, indices: np.ndarray) -> Tensor:
        """Return int64 indices on the device."""
        on_host = torch.from_numpy(indices.astype(np.int64))
        return pin(on_host, self._device).to(self._device, non_blocking=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [n, V] of hidden states [n, 1, h]."""
        head = self.model.head
        return head.whole(head.project(hidden))[:, 0]

    def _plan_prompt_logprobs(
        self, scheduler_output: SchedulerOutput, outputs: Mapping[SequenceState, OutputState]
    ) -> list[PromptLogprobs]:
        """Return the prompt tokens whose log-probabilities the step computes."""
        prompt_logprobs = []
        for n, (seq, start) in enumerate(
            zip(scheduler_output.sequences, scheduler_output.num_computed_tokens, strict=True)
        ):
            if not seq.needs_prompt_logits:
                continue
            output = outputs[seq]
            row_start = int(scheduler_output.query_bounds[scheduler_output.batch_row(n)])
            end = min(seq.num_prompt_tokens - 1, start + scheduler_output.num_scheduled_tokens[n])
            # A recomputed sequence already has the log-probabilities of its first tokens.
            if output.num_prompt_logprobs < end:
                tokens = seq.tokens[output.num_prompt_logprobs + 1 : end + 1]
                num_top = min(output.request.sampling.logprobs or 0, self.vocab_size)
                offset = row_start + output.num_prompt_logprobs - start
                prompt_logprobs.append(PromptLogprobs(output, offset, tokens, num_top))
                output.num_prompt_logprobs = end
            if output.num_prompt_logprobs == seq.num_prompt_tokens - 1:
                seq.needs_prompt_logits = False
        return prompt_logprobs

    def _compute_prompt_logprobs(self, entry: PromptLogprobs, hidden: Tensor) -> Tensor:
        """Return fp64 [c (2 + 2k)]: for each of c tokens its log-probability and its rank, then the
        ids and the log-probabilities of its k alternatives."""
        chunks = []
        for start in range(0, len(entry.tokens), LOGPROB_CHUNK_TOKENS):
            chunk = entry.tokens[start : start + LOGPROB_CHUNK_TOKENS]
            tokens = torch.tensor(chunk, device=hidden.device)
            states = hidden[entry.start + start :][: len(tokens)]
            logprobs = self.logits(states).log_softmax(-1)  # [c, V]
            top = most_probable(logprobs, [entry.num_top] * len(tokens))
            # Ranks count over the whole vocabulary: a token may be outside its k alternatives.
            ranks = token_ranks(logprobs, tokens)
            columns = [logprobs.gather(1, tokens[:, None]), ranks[:, None], *top]
            chunks.append(torch.cat([x.double() for x in columns if x is not None], 1))
        return torch.cat(chunks).flatten()
