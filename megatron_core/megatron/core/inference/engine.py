# SPDX-License-Identifier: Apache-2.0
"""Inference engine: continuous batching over a paged KV cache (Yu et al. 2022, "Orca").

Requests may be added and aborted between any two steps. `step` schedules tokens of all running
sequences (`scheduler`), copies the step's arrays to the device in one transfer, runs the model on
the packed tokens [t, 1, h], and samples one token for each sequence whose tokens are all computed:

    >>> shapes = CacheShapes.from_modules(model.modules(), torch.float32)
    >>> config = EngineConfig(num_blocks=64, max_num_seqs=16)
    >>> engine = Engine(model, config, shapes=shapes, vocab_size=model.config.vocab_size)
    >>> request_id = engine.add(EngineRequest(prompt=(5, 6, 7), max_new_tokens=20))
    >>> outputs = Completions()
    >>> while engine.unfinished:
    ...     outputs.add(engine.step())
    >>> len(outputs[request_id, 0].tokens)
    20

The output of a request depends only on its prompt, parameters, seed and sequence number, apart from
the rounding of matrix products at another batch size. Other requests, chunked prefill, preemption,
the prefix cache and asynchronous scheduling do not change it.

With tensor parallelism each rank runs its own engine with the same requests. All ranks compute the
same logits and sample the same tokens, so no token is communicated. With pipeline parallelism the
last stage samples and sends the tokens to the other stages (`stages`). As many steps are in flight
as there are stages, with disjoint sequences.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron.core.comm.collectives import Pending, all_reduce
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.layout import PagedRows
from megatron.core.device import (
    HostCopy,
    Recorder,
    Work,
    WorkQueue,
    give_back_memory,
    pin,
    to_host,
)
from megatron.core.inference.cache import CacheShapes, PagedCache
from megatron.core.inference.decode_graphs import DecodeGraphs, DecodeInputs, GraphStats
from megatron.core.inference.output_state import OutputState, PromptLogprobs, PromptScores
from megatron.core.inference.requests import (
    Completion,
    Completions,
    EngineRequest,
    OutputDelta,
    check_request,
)
from megatron.core.inference.sampling import (
    Chosen,
    Sampled,
    SampleRow,
    sample,
    verified,
)
from megatron.core.inference.scheduler import (
    DraftLength,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
    SequenceState,
    SharedStep,
)
from megatron.core.inference.sizes import CacheSizes, EngineConfig
from megatron.core.inference.speculation import (
    ComputedStep,
    Proposer,
    SampledSequence,
)
from megatron.core.inference.stages import (
    PipelineGroups,
    StageLink,
    StepResult,
    pack_results,
    unpack_results,
)
from megatron.core.moe.dispatch import MAX_PADDED_ROWS
from megatron.core.ops.paged_attention import PagedBatch
from megatron.core.ops.sampling.cpu import most_probable
from megatron.core.ops.sequences import Sequences
from megatron.core.process_groups import Group

#: Maps the layout, the hidden states and the sampled tokens of a step to drafts of the next step.
_Predict = Callable[[SequenceLayout, Tensor, Sampled | None], Sequence[Sequence[int]]]

#: Tokens per chunk of prompt log-probabilities. It bounds the logits to [256, V] fp32.
LOGPROB_CHUNK_TOKENS = 256


class Head(Protocol):
    """Output head, for example `megatron.core.tensor_parallel.VocabParallelHead`."""

    def gathered(self, hidden: Tensor) -> Tensor:
        """All-gather the hidden states of sequence-parallel ranks to [s, b, h]."""

    def project(self, hidden: Tensor) -> Tensor:
        """Map hidden states [s, b, h] to this rank's logits [s, b, V/tp]."""

    def whole(self, logits: Tensor) -> Tensor:
        """All-gather logits to fp32 [s, b, V], equal on all ranks, without padding columns."""

    def write_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write `whole(project(hidden))` to `out` [s, b, V] and return `out`."""


class LanguageModel(Protocol):
    """Model interface of the engine, for example `megatron.core.models.gpt.GPTModel`.

    With pipeline parallelism it is the stage of this rank; only the last stage needs `head`.
    """

    head: Head

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
    """A step that the device computes; `Engine._finish` waits for it.

    Args:
        plan: schedule of the step.
        seqs: sequences that get a token.
        num_logits: number of sampled positions, drafts included.
        prompt_logprobs: prompt tokens with log-probabilities.
        num_top: reported alternatives per sampled token.
        work: handle of the computation.
    """

    plan: SchedulerOutput
    seqs: tuple[SequenceState, ...]
    num_logits: int
    prompt_logprobs: list[PromptLogprobs]
    num_top: int
    work: Work[StepResult]


class Engine:
    """Generate tokens for requests with continuous batching.

    Args:
        model: the model; a trainer may share its weights.
        config: sizes of the cache and of a step.
        shapes: shapes of the model's cache entries.
        vocab_size: vocabulary size without padding.
        max_length: longest sequence of the model in tokens; None means no limit.
        device: device of the model.
        features: optional engine features.

    Raises:
        ValueError: the features are incompatible, or the drafts do not fit a step or the cache.

    Attributes:
        cache: KV pages and recurrent states.
        scheduler: schedules the steps.
        link: exchanges data with the other pipeline stages.
        epoch: number of weight replacements.
        paused: True while `step` computes nothing.
        joined: steps in which this replica had no tokens and computed only its experts.
        model_seconds: seconds of `step` in the model, drafting and sampling, without waiting for
            other pipeline stages. The remaining time is host bookkeeping.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        shapes: CacheShapes,
        vocab_size: int,
        max_length: int | None = None,
        device: torch.device | str = "cpu",
        features: EngineFeatures | None = None,
    ) -> None:
        features = features or EngineFeatures()
        features.check(config)
        self.model, self.config, self.device = model, config, torch.device(device)
        self.proposer, self._check_plans = features.proposer, features.check_plans
        self._expert_peers = features.expert_peers
        self.max_length, self.vocab_size = max_length, vocab_size
        groups = features.pipeline or PipelineGroups.single()
        self.link = StageLink(groups, dtype=shapes.dtype, device=self.device)
        sizes = CacheSizes.for_all_stages(config, shapes, max_length, self.link)
        sizes.check_drafts(config)
        self.cache = PagedCache(
            shapes,
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            num_slots=sizes.num_slots,
            device=device,
        )
        self.scheduler = Scheduler(
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
            states=self.cache.states if sizes.has_states else None,
            window=sizes.window,
            token_multiple=config.token_multiple,
        )
        self.epoch, self.joined, self.paused, self.model_seconds = 0, 0, False, 0.0
        predicts = self.proposer is not None and self.proposer.stage == "last"
        # Largest number of drafts per sequence that a step predicts.
        self._num_predicted = config.num_speculative_tokens if predicts else 0
        self._outputs: dict[SequenceState, OutputState] = {}
        self._next_id = 0
        self._queue = WorkQueue(self.device, in_thread=config.asynchronous)
        self._in_flight: deque[StepInFlight] = deque()  # oldest first
        self._join_work: deque[Work[None]] = deque()  # unfinished work of `joined` steps
        self._max_in_flight = 2 if config.asynchronous else self.link.count
        self._graphs: DecodeGraphs | None = None
        if features.make_recorder is not None:
            self._graphs = self._make_graphs(features.make_recorder)
        self._asleep: HostCopy | None = None
        # Deltas of steps that `drain` has finished; the next `step` returns them.
        self._undelivered: list[OutputDelta] = []
        # Newest token of each sequence by row, on the device. A step that was scheduled before its
        # predecessor was sampled reads its input tokens from here, so the host need not wait.
        self._newest = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)

    def _make_graphs(self, make_recorder: Callable[[], Recorder]) -> DecodeGraphs:
        """Return the graph runner of decode steps."""
        drafts = 0 if self.cache.shapes.states else self.config.num_speculative_tokens
        # A graph computes each draft as a row of its own.
        num_rows = self.config.max_num_seqs * (1 + drafts)
        max_context = self.cache.num_blocks * self.config.block_size
        shared = self._expert_peers is not None
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
            max_context=min(max_context, self.max_length or max_context),
            shares_experts=shared,
        )

    @property
    def asleep(self) -> bool:
        """Whether the engine is between `sleep` and `wake`."""
        return self._asleep is not None

    @property
    def unfinished(self) -> int:
        """Number of unfinished outputs."""
        return len(self._outputs)

    @property
    def graphs(self) -> GraphStats | None:
        """Counters of the graphs; None without graphs."""
        return None if self._graphs is None else self._graphs.stats

    @property
    def stats(self) -> SchedulerStats:
        """Counters of the scheduler and the prefix cache."""
        return self.scheduler.stats

    def check(self, request: EngineRequest) -> None:
        """Raise ValueError for a request that `add` rejects: the request is invalid, the cache is
        too small, or the engine is asleep."""
        if self._asleep is not None:
            raise ValueError("the engine is asleep and accepts no requests: wake it first")
        check_request(request, max_length=self.max_length, vocab_size=self.vocab_size)
        self.scheduler.check(len(request.prompt) + request.max_new_tokens)

    def add(self, request: EngineRequest) -> int:
        """Queue a request and return its id.

        Raises:
            ValueError: as in `check`, or the id is the id of an unfinished request.
        """
        self.check(request)
        used = {output.request.request_id for output in self._outputs.values()}
        request, request_id = request.with_id(self._next_id, used)
        # Only the first output computes the prompt's log-probabilities; the others share them.
        outputs, prompt_scores = [], PromptScores.begin(request)
        for index in range(request.n):
            seq = SequenceState(
                tokens=list(request.prompt),
                num_prompt_tokens=len(request.prompt),
                max_length=len(request.prompt) + request.max_new_tokens,
                priority=request.priority,
                needs_prompt_logits=request.prompt_logprobs and index == 0,
                needs_output_tokens=request.mask is not None or request.sampling.penalizes,
                draft_length=DraftLength(max_drafts=self.config.num_speculative_tokens),
            )
            outputs.append(OutputState(seq, request, index, prompt_scores))
        for output in outputs:
            if request.forced is not None:
                output.update_forced_tokens(request.forced)
            self.scheduler.add(output.seq)
            self._outputs[output.seq] = output
        self._next_id = max(self._next_id, request_id + 1)
        return request_id

    def abort(self, request_id: int) -> list[OutputDelta]:
        """Abort the unfinished outputs of a request; return their last deltas, [] if the request
        has finished."""
        outputs = [o for o in self._outputs.values() if o.request.request_id == request_id]
        # The caller gets the tokens of finished steps before the end of the output.
        deltas = [delta for delta in self._undelivered if delta.request_id == request_id]
        self._undelivered = [d for d in self._undelivered if d.request_id != request_id]
        for output in outputs:
            self._end(output)
        return [*deltas, *(output.delta("abort") for output in outputs)]

    def finish(self, request_id: int, index: int) -> None:
        """End one output, because the caller detected a stop string; no delta of it follows."""
        for output in list(self._outputs.values()):
            if (output.request.request_id, output.index) == (request_id, index):
                self._end(output)
        self._undelivered = [d for d in self._undelivered if d[:2] != (request_id, index)]

    def pause(self, *, keep_cache: bool = True) -> None:
        """Stop computing until `resume`.

        Args:
            keep_cache: True keeps the cache entries of the running sequences. False frees them and
                recomputes the sequences after `resume`.
        """
        # Set before draining, so that no further step is launched.
        self.paused = True
        self.drain()
        if not keep_cache:
            self.scheduler.preempt_all()
            self.scheduler.reset_prefix_cache()

    def resume(self) -> None:
        """Continue after `pause`.

        Raises:
            ValueError: the engine is asleep.
        """
        if self._asleep is not None:
            raise ValueError("the engine is asleep: wake it")
        self.paused = False

    def sleep(self, weights: Iterable[Tensor] = ()) -> None:
        """Free the device memory of the cache, and optionally of weights, until `wake`.

        Call it between two steps, for example so that a trainer on the same device can use the
        memory. The proposer of drafts frees its memory as well. Running sequences are recomputed
        after `wake`. While asleep, the engine rejects requests.

        Args:
            weights: weights to move to host memory.

        Raises:
            ValueError: the engine is asleep.
        """
        if self._asleep is not None:
            raise ValueError("the engine is asleep: wake it first")
        # The cache is lost, so all running sequences must be recomputed.
        self.pause(keep_cache=False)
        offloaded = tuple(weights)
        if self.proposer is not None:
            self.proposer.sleep(weights=bool(offloaded))
        self.cache.give_back()
        # Graphs hold addresses of the freed cache.
        if self._graphs is not None:
            self._graphs.forget()
        self._asleep = HostCopy(offloaded)
        give_back_memory(self.device)

    def wake(self) -> None:
        """Allocate the cache, restore the weights and continue after `sleep`.

        Raises:
            ValueError: the engine is awake.
        """
        if self._asleep is None:
            raise ValueError("the engine is awake: only a sleeping engine can be woken")
        self._asleep.restore()
        self._asleep = None
        self.cache.allocate()
        if self.proposer is not None:
            self.proposer.wake()
        self.resume()

    def weights_replaced(self) -> None:
        """Update the engine after the model's weights have been replaced in place.

        Call it between two steps. Running sequences continue with their cache entries. The prefix
        cache is emptied, and later tokens carry the new `epoch`.

        Raises:
            ValueError: a step is in flight and may have read old and new weights. With
                asynchronous scheduling or pipeline stages, `pause` before writing weights.
        """
        # A finished step that awaits `_finish` counts as in flight as well: its drafts and tokens
        # come from the old weights, but would be committed under the new epoch.
        if self._in_flight or (self.config.asynchronous and self._join_work):
            raise ValueError(
                "weights were replaced while a step was in flight: pause the engine before "
                "writing them"
            )
        # Copies of weights and captured graphs must follow before the next step reads them.
        self.epoch += 1
        self.model.weights_replaced()
        if self._graphs is not None:
            self._graphs.weights_replaced()
        self.scheduler.reset_prefix_cache()

    def step(self) -> list[OutputDelta]:
        """Compute one step; return the new tokens of each output, in any order.

        Raises:
            ValueError: with `check_plans`, the ranks have scheduled different steps.
        """
        if self._expert_peers is None:
            while len(self._in_flight) < self._max_in_flight:
                plan = self._schedule()
                if plan is None:
                    break
                self._in_flight.append(self._launch(plan))
        else:
            self._launch_with_peers(self._expert_peers)
        deltas, self._undelivered = self._undelivered, []
        if self._in_flight:
            deltas += self._finish(self._in_flight.popleft())
        # All outputs have finished: the steps in flight only compute wasted tokens.
        if self._in_flight and not self._outputs:
            self.drain()
        return deltas

    def drain(self) -> None:
        """Wait for all steps in flight; the next `step` returns their deltas."""
        while self._in_flight:
            self._undelivered += self._finish(self._in_flight.popleft())
        while self._join_work:
            self._join_work.popleft().result()

    # --- one step ---------------------------------------------------------------------------------

    def _schedule(self) -> SchedulerOutput | None:
        """Schedule a step; None if enough steps are in flight or there is no work."""
        if self.paused or len(self._in_flight) >= self._max_in_flight:
            return None
        propose = None if self.proposer is None else self._propose
        return self.scheduler.schedule(propose, stages=self.link.count)

    def _launch_with_peers(self, peers: Group) -> None:
        """Launch steps in lockstep with the data-parallel ranks that share experts.

        Before each step all ranks agree on the largest number of tokens and on whether the step
        runs as a graph. A rank without tokens joins the step (`_join`).
        """
        # Every rank must call this all-reduce equally often, so the loop ends only on the agreed
        # value, never on the local plan.
        for _ in range(self._max_in_flight):
            plan, local_values = self._schedule(), [0, 0]
            if plan is not None:
                eager = self._graphs is None or not self._graphs.supports(plan)
                local_values = [len(plan.tokens), eager]
            max_tokens, eager = all_reduce(torch.tensor(local_values), peers, op="max").tolist()
            if not max_tokens:
                return
            shared = SharedStep(max_tokens, bool(eager))
            if plan is not None:
                self._in_flight.append(self._launch(plan, shared))
                continue
            self._join_work.append(self._queue.submit(functools.partial(self._join, shared)))
            self.joined += 1
            if len(self._join_work) > self._max_in_flight:
                self._join_work.popleft().result()

    @torch.no_grad()
    def _join(self, shared: SharedStep) -> None:
        """Compute this rank's experts in a step of the other replicas."""
        if self._graphs is None or shared.eager:
            self.model.join_experts(shared.max_tokens)
        else:
            self._graphs.join(shared.max_tokens)

    def _launch(self, plan: SchedulerOutput, shared: SharedStep | None = None) -> StepInFlight:
        """Launch a step: the model, sampling, and the copies to the host.

        Args:
            plan: schedule of the step.
            shared: agreement of the ranks that share experts; None without them.
        """
        if self._in_flight and not self._in_flight[-1].work.done:
            self.stats.overlapped += 1
        seqs = tuple(plan.sequences[n] for n in plan.sampled)
        sample_rows = [
            self._outputs[seq].sample_row(seq.draft_tokens[:num_drafts])
            for seq in seqs
            for num_drafts in range(len(seq.draft_tokens) + 1)
        ]
        num_top = max((row.params.logprobs or 0 for row in sample_rows), default=0)
        num_top = min(num_top, self.vocab_size)
        prompt_logprobs = self._plan_prompt_logprobs(plan)
        predict = None
        if self._num_predicted and self.link.is_last:
            sampled = [self._outputs[seq].sampled_sequence() for seq in seqs]
            predict = functools.partial(
                self._predict, plan, plan.next_tokens(self._num_predicted), sampled
            )
        # The size of the result message is known now, so that other stages can post the receive
        # before the last stage sends: 3 values and 2 k alternatives per sampled position.
        num_values = len(sample_rows) * (3 + 2 * num_top)
        num_values += sum(entry.num_values for entry in prompt_logprobs)
        num_values += len(seqs) * self._num_predicted
        start, idle = time.perf_counter(), self.link.idle_seconds
        work = self._queue.submit(
            lambda: self._compute(plan, sample_rows, prompt_logprobs, predict, num_values, shared)
        )
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        return StepInFlight(
            plan=plan,
            seqs=seqs,
            num_logits=len(sample_rows),
            prompt_logprobs=prompt_logprobs,
            num_top=num_top,
            work=work,
        )

    def _finish(self, step: StepInFlight) -> list[OutputDelta]:
        """Wait for the oldest step in flight; return its deltas."""
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
                drafts_shape=(len(step.seqs), self._num_predicted),
            )
        drafted = [step.plan.draft_tokens[n] for n in step.plan.sampled]
        chosen = [] if sampled is None else verified(sampled, drafted)
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        # `commit` appends the accepted drafts, so it precedes the outputs' sampled tokens.
        pairs = zip(step.seqs, chosen, strict=True)
        self.scheduler.commit(step.plan, {seq: choice.accepted for seq, choice in pairs})
        for entry, values in zip(step.prompt_logprobs, logprobs, strict=True):
            entry.append_to_output(values)
        deltas = self._update_outputs(step.seqs, chosen)
        if self._num_predicted:
            for seq, predicted in zip(step.seqs, drafts, strict=True):
                if seq in self._outputs:
                    self._outputs[seq].predicted = predicted
        return deltas

    # Not inference_mode: weight-gather buffers allocated there would be inference tensors, which
    # autograd rejects when training uses them.
    @torch.no_grad()
    def _compute(
        self,
        plan: SchedulerOutput,
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
            plan: schedule of the step.
            sample_rows: sampling inputs of the sampled positions.
            prompt_logprobs: prompt tokens with log-probabilities.
            predict: predicts drafts; None without a predicting proposer.
            num_values: number of values in the result message of the last stage.
            shared: agreement of the ranks that share experts; None without them.
        """
        if self._check_plans is not None:
            self.link.require_same_plan(plan, self._check_plans)
        # Before the model: the copies read the states that the previous step left.
        self.cache.states.copy(plan.state_copies)
        if self._graphs is not None and self._graphs.prepare(plan, shared):
            hidden, logits = self._graphs(plan, shared)
            sampled = sample(self._select_rows(logits, plan.logits_indices), sample_rows)
            host_sampled, drafts = self._store_newest(plan, sampled), []
            if predict is not None:
                drafts = predict(self._prepare_inputs(plan)[1], hidden, sampled)
            return StepResult(sampled=host_sampled, drafts=drafts)
        results = None
        # Post the receive first: results have their own communicator, and the last stage must not
        # block on a receiver that is still computing.
        if num_values and not self.link.is_last:
            results = self.link.expect_results(num_values)
        tokens, layout = self._prepare_inputs(plan, shared)
        hidden = self._forward(tokens, layout)
        if not self.link.is_last:
            return StepResult(results=results, sends=self.link.send_hidden(hidden))
        device_logprobs = [
            self._compute_prompt_logprobs(entry, hidden) for entry in prompt_logprobs
        ]
        sampled, drafts = None, []
        if sample_rows:
            logits = self.logits(self._select_rows(hidden, plan.logits_indices))
            sampled = sample(logits, sample_rows)
        host_sampled = None if sampled is None else self._store_newest(plan, sampled)
        if predict is not None:
            drafts = predict(layout, hidden, sampled)
        sends: Sequence[Pending] = ()
        if num_values and self.link.count > 1:
            values = pack_results(sampled, device_logprobs, drafts, max_drafts=self._num_predicted)
            sends = self.link.send_results(values)
        host_logprobs = [to_host(values) for values in device_logprobs]
        return StepResult(
            sampled=host_sampled, prompt_logprobs=host_logprobs, drafts=drafts, sends=sends
        )

    def _predict(
        self,
        plan: SchedulerOutput,
        next_tokens: Sequence[Sequence[int]],
        seqs: Sequence[SampledSequence],
        layout: SequenceLayout,
        hidden: Tensor,
        sampled: Sampled | None,
    ) -> Sequence[Sequence[int]]:
        """Return the proposer's drafts after a step. The host waits for the sampled tokens."""
        assert self.proposer is not None
        drafted = [plan.draft_tokens[n] for n in plan.sampled]
        chosen = [] if sampled is None else verified(sampled, drafted)
        step = ComputedStep(
            plan=plan,
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

    def _store_newest(self, plan: SchedulerOutput, sampled: Sampled) -> Sampled:
        """Store the newest tokens for steps that are scheduled already; start the copy to the
        host."""
        if self.config.asynchronous:
            tokens = sampled.tokens
            # No step is scheduled after drafts, so any of the sampled tokens may be stored.
            if any(plan.draft_tokens):
                counts = [1 + len(plan.draft_tokens[n]) for n in plan.sampled]
                tokens = tokens[self._index_tensor(np.cumsum(counts) - 1)]
            self._newest[self._index_tensor(np.array(plan.sampled_rows))] = tokens
        return sampled.on_host()

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

    def _propose(self, max_drafts: Sequence[tuple[SequenceState, int]]) -> list[Sequence[int]]:
        """Return drafts for (sequence, largest number of drafts) pairs."""
        assert self.proposer is not None
        start = time.perf_counter()
        outputs = [self._outputs[seq] for seq, _ in max_drafts]
        # The proposer also guesses pending tokens; the drafts are the tokens after the guesses.
        pending = [seq.num_pending_tokens for seq, _ in max_drafts]
        contexts = [
            output.context(num_pending + count)
            for output, num_pending, (_, count) in zip(outputs, pending, max_drafts, strict=True)
        ]
        proposed, idle = self.proposer.propose(contexts), self.link.idle_seconds
        if self.proposer.stage == "first":
            max_count = max(context.max_drafts for context in contexts)
            proposed = self.link.broadcast_drafts(proposed, max_count)
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        return [
            output.valid_prefix(drafts)[num_pending:]
            for output, num_pending, drafts in zip(outputs, pending, proposed, strict=True)
        ]

    def _prepare_inputs(
        self, plan: SchedulerOutput, shared: SharedStep | None = None
    ) -> tuple[Tensor, SequenceLayout]:
        """Return the scheduled tokens, int64 [t] on the device, and their layout."""
        int64_arrays = plan.tokens, plan.positions, plan.slot_mapping, plan.state_slots
        int32_arrays = plan.query_bounds, plan.context_lengths, plan.block_table
        on_device = self._copy_to_device(int64_arrays, int32_arrays)
        tokens, positions, slots, states, bounds, contexts, table = on_device
        if plan.tokens.min() < 0:
            tokens = self._fill_pending(tokens)
        decode = plan.decode_rows + plan.padding
        prefill = None
        if plan.decode_rows < len(plan.sequences):
            ends = (plan.query_bounds[decode:] - decode).tolist()
            prefill = Sequences(ends, device=self.device)
        paged = PagedRows(
            batch=PagedBatch(
                block_table=table,
                query_bounds=bounds,
                context_lengths=contexts,
                max_query=max(plan.num_scheduled_tokens),
                max_context=int(plan.context_lengths.max()),
                cpu_dtype=self.cache.shapes.cpu_dtype,
            ),
            slot_mapping=slots,
            state_slots=states,
            decode_rows=decode,
            prefill=prefill,
            most_tokens=None if shared is None else shared.max_tokens,
        )
        return tokens, SequenceLayout(positions, paged=paged)

    def _forward(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Run this stage on tokens int64 [t]; the last stage returns gathered hidden states
        [t, 1, h]."""
        tokens, inputs = tokens.unsqueeze(0), {}
        if not self.link.is_first:
            shape = self.model.boundary_shape(tokens)
            inputs["hidden_states"] = self.link.receive_hidden(shape)
        hidden = self.model(tokens, layout=layout, cache=self.cache, **inputs)
        return self.model.head.gathered(hidden) if self.link.is_last else hidden

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
        on_device = pin(torch.from_numpy(flat), self.device).to(self.device, non_blocking=True)
        sizes = [2 * array.size for array in int64_arrays] + [array.size for array in int32_arrays]
        tensors = on_device.split_with_sizes(sizes)
        int32_tensors = tensors[len(int64_arrays) :]
        return (
            *(tensor.view(torch.int64) for tensor in tensors[: len(int64_arrays)]),
            *(x.view(a.shape) for x, a in zip(int32_tensors, int32_arrays, strict=True)),
        )

    def _select_rows(self, hidden: Tensor, indices: np.ndarray) -> Tensor:
        """Return rows [n, 1, h] of `hidden`; all rows need no copy."""
        if len(indices) == hidden.shape[0]:
            return hidden
        return hidden.index_select(0, self._index_tensor(indices))

    def _index_tensor(self, indices: np.ndarray) -> Tensor:
        """Return int64 indices on the device."""
        on_host = torch.from_numpy(indices.astype(np.int64))
        return pin(on_host, self.device).to(self.device, non_blocking=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [n, V] of hidden states [n, 1, h]."""
        head = self.model.head
        return head.whole(head.project(hidden))[:, 0]

    def _update_outputs(
        self, seqs: Sequence[SequenceState], chosen: Sequence[Chosen]
    ) -> list[OutputDelta]:
        """Append the sampled tokens to the outputs and finish the outputs at their end."""
        deltas = []
        for seq, choice in zip(seqs, chosen, strict=True):
            output = self._outputs.get(seq)
            if output is None:  # finished or aborted while the step ran
                self.stats.wasted += len(choice.tokens)
                continue
            delta = output.append(choice, self.epoch)
            deltas.append(delta)
            if delta.finish_reason:
                self._end(output)
            elif output.request.forced is not None:
                output.update_forced_tokens(output.request.forced)
        return deltas

    def _plan_prompt_logprobs(self, plan: SchedulerOutput) -> list[PromptLogprobs]:
        """Return the prompt tokens whose log-probabilities the step computes."""
        prompt_logprobs = []
        for n, (seq, start) in enumerate(
            zip(plan.sequences, plan.num_computed_tokens, strict=True)
        ):
            if not seq.needs_prompt_logits:
                continue
            output = self._outputs[seq]
            row_start = int(plan.query_bounds[plan.batch_row(n)])
            end = min(seq.num_prompt_tokens - 1, start + plan.num_scheduled_tokens[n])
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
        """Return fp64 [c (1 + 2k)]: for each of c tokens its log-probability, then the ids and the
        log-probabilities of its k alternatives."""
        chunks = []
        for start in range(0, len(entry.tokens), LOGPROB_CHUNK_TOKENS):
            chunk = entry.tokens[start : start + LOGPROB_CHUNK_TOKENS]
            tokens = torch.tensor(chunk, device=hidden.device)
            states = hidden[entry.start + start :][: len(tokens)]
            logprobs = self.logits(states).log_softmax(-1)  # [c, V]
            columns = [logprobs.gather(1, tokens[:, None])]
            if entry.num_top:
                columns += most_probable(logprobs, [entry.num_top] * len(tokens))
            chunks.append(torch.cat([column.double() for column in columns], 1))
        return torch.cat(chunks).flatten()

    def _end(self, output: OutputState) -> None:
        """Forget an output and free its cache entries."""
        self.scheduler.remove(output.seq)
        del self._outputs[output.seq]


def generate(engine: Engine, requests: Iterable[EngineRequest]) -> list[list[Completion]]:
    """Generate until all requests have finished; return the outputs of each request.

    Raises:
        ValueError: the engine cannot serve a request. No request has been added then.
    """
    requests = list(requests)
    for number, request in enumerate(requests, 1):
        try:
            check_request(request, max_length=engine.max_length, vocab_size=engine.vocab_size)
        except ValueError as error:
            raise ValueError(f"request {number} of {len(requests)}: {error}") from None
    ids = [engine.add(request) for request in requests]
    outputs = Completions()
    while engine.unfinished:
        outputs.add(engine.step())
    return [[outputs[n, i] for i in range(r.n)] for n, r in zip(ids, requests, strict=True)]
