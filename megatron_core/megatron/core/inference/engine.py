# SPDX-License-Identifier: Apache-2.0
"""Inference engine: continuous batching over a paged KV cache (Yu et al. 2022, "Orca").

Requests may be added and aborted between any two steps. `step` schedules tokens of all running
sequences (`scheduler`), copies the step's arrays to the device in one transfer, runs the model on
the packed tokens [t, 1, h], and samples one token for each sequence whose tokens are all computed:

    >>> engine = Engine(model, EngineConfig(num_blocks=64, max_num_seqs=16))
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

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.device import HostCopy, Work, give_back_memory
from megatron.core.inference.cache import CacheSizes, EngineConfig, PagedCache
from megatron.core.inference.decode_graphs import GraphStats
from megatron.core.inference.model_runner import (
    EngineFeatures,
    FinishedStep,
    LanguageModel,
    ModelRunner,
    StepInFlight,
)
from megatron.core.inference.request_state import (
    DraftLength,
    OutputState,
    PromptScores,
    SchedulerOutput,
    SchedulerStats,
    SequenceState,
    SharedStep,
)
from megatron.core.inference.requests import (
    Completion,
    Completions,
    EngineRequest,
    OutputDelta,
    check_request,
)
from megatron.core.inference.scheduler import Scheduler
from megatron.core.inference.stages import PipelineGroups, StageLink
from megatron.core.inference.token_constraints import constrained
from megatron.core.process_groups import Group


class Engine:
    """Generate tokens for requests with continuous batching.

    Args:
        model: the model; a trainer may share its weights.
        config: sizes of the cache and of a step.
        features: optional engine features.

    Raises:
        ValueError: the features are incompatible, or the drafts do not fit a step or the cache.

    Attributes:
        config: the config, with the model's limit as `max_model_len`.
        cache: KV pages and recurrent states.
        scheduler: schedules the steps.
        runner: runs the steps.
        link: exchanges data with the other pipeline stages.
        epoch: number of weight replacements.
        paused: True while `step` computes nothing.
        joined: steps in which this replica had no tokens and computed only its experts.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        features: EngineFeatures | None = None,
    ) -> None:
        features = features or EngineFeatures()
        features.check(config)
        config = self.config = config.limited_to(model.max_sequence_length)
        shapes, self.vocab_size, self.device = model.cache_shapes, model.vocab_size, model.device
        self.proposer, self._expert_peers = features.proposer, features.expert_peers
        groups = features.pipeline or PipelineGroups.single()
        self.link = StageLink(groups, dtype=shapes.dtype, device=self.device)
        sizes = CacheSizes.for_all_stages(config, shapes, self.link)
        sizes.check_drafts(config)
        self.cache = PagedCache(
            shapes,
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            num_slots=sizes.num_slots,
            num_window_blocks=sizes.num_window_blocks,
            device=self.device,
        )
        self.scheduler = Scheduler(
            sizes=sizes,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
            states=self.cache.states if sizes.has_states else None,
            token_multiple=config.token_multiple,
        )
        # The runner captures the addresses of the cache in graphs: `sleep` makes it forget them.
        self.runner = ModelRunner(
            model,
            config,
            cache=self.cache,
            link=self.link,
            features=features,
        )
        self.epoch, self.joined, self.paused = 0, 0, False
        self._outputs: dict[SequenceState, OutputState] = {}
        self._num_unfinished: dict[int, int] = {}  # outputs by request id
        self._next_id = 0
        self._in_flight: deque[StepInFlight] = deque()  # oldest first
        self._join_work: deque[Work[None]] = deque()  # unfinished work of `joined` steps
        self._max_in_flight = 2 if config.asynchronous else self.link.count
        self._asleep: HostCopy | None = None
        # Deltas of steps that `drain` has finished; the next `step` returns them.
        self._undelivered: list[OutputDelta] = []

    @property
    def asleep(self) -> bool:
        """Whether the engine is between `sleep` and `wake`."""
        return self._asleep is not None

    @property
    def capacity(self) -> int:
        """Longest sequence in tokens that the cache and the model hold."""
        num_tokens = self.cache.num_blocks * self.config.block_size
        return min(num_tokens, self.config.max_model_len or num_tokens)

    @property
    def unfinished(self) -> int:
        """Number of unfinished outputs."""
        return len(self._outputs)

    @property
    def graphs(self) -> GraphStats | None:
        """Counters of the graphs; None without graphs."""
        return None if self.runner.graphs is None else self.runner.graphs.stats

    @property
    def stats(self) -> SchedulerStats:
        """Counters of the scheduler and the prefix cache."""
        return self.scheduler.stats

    def check(self, request: EngineRequest) -> None:
        """Raise ValueError for a request that `add` rejects: the request is invalid, the cache is
        too small, or the engine is asleep."""
        if self._asleep is not None:
            raise ValueError("the engine is asleep and accepts no requests: wake it first")
        check_request(request, max_length=self.config.max_model_len, vocab_size=self.vocab_size)
        self.scheduler.kv_cache.check(request.max_length)

    def add(self, request: EngineRequest) -> int:
        """Queue a request and return its id.

        Raises:
            ValueError: as in `check`, or the id is the id of an unfinished request.
        """
        self.check(request)
        request, request_id = request.with_id(self._next_id, self._num_unfinished)
        request = constrained(request, self.vocab_size)
        # Only the first output computes the prompt's log-probabilities; the others share them.
        outputs, prompt_scores = [], PromptScores.begin(request)
        for index in range(request.n):
            seq = SequenceState(
                tokens=list(request.prompt),
                num_prompt_tokens=len(request.prompt),
                max_length=request.max_length,
                priority=request.priority,
                needs_prompt_logits=request.prompt_logprobs and index == 0,
                cache_salt=request.cache_salt,
                needs_output_tokens=request.mask is not None or request.sampling.penalizes,
                draft_length=DraftLength(max_drafts=self.config.num_speculative_tokens),
            )
            outputs.append(OutputState(seq, request, index, prompt_scores))
        for output in outputs:
            if request.forced is not None:
                output.update_forced_tokens(request.forced)
            self.scheduler.add(output.seq)
            self._outputs[output.seq] = output
        self._num_unfinished[request_id] = request.n
        self._next_id = max(self._next_id, request_id + 1)
        return request_id

    def abort(self, request_id: int) -> list[OutputDelta]:
        """Abort the unfinished outputs of a request; return their last deltas, [] if the request
        has finished."""
        outputs = [o for o in self._outputs.values() if o.request_id == request_id]
        # The caller gets the tokens of finished steps before the end of the output.
        deltas = [delta for delta in self._undelivered if delta.request_id == request_id]
        self._undelivered = [d for d in self._undelivered if d.request_id != request_id]
        for output in outputs:
            self._end(output)
        return [*deltas, *(output.aborted() for output in outputs)]

    def finish(self, request_id: int, index: int) -> None:
        """End one output, because the caller detected a stop string; no delta of it follows."""
        for output in list(self._outputs.values()):
            if (output.request_id, output.index) == (request_id, index):
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
        if self.runner.graphs is not None:
            self.runner.graphs.forget()
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
        self.runner.model.weights_replaced()
        if self.runner.graphs is not None:
            self.runner.graphs.weights_replaced()
        self.scheduler.reset_prefix_cache()

    def step(self) -> list[OutputDelta]:
        """Compute one step; return the new tokens of each output, in any order.

        Raises:
            ValueError: with `check_plans`, the ranks have scheduled different steps.
        """
        for scheduler_output, shared in self._schedule():
            step = self.runner.launch(scheduler_output, self._outputs, shared=shared)
            self._in_flight.append(step)
        deltas, self._undelivered = self._undelivered, []
        if self._in_flight:
            step = self._in_flight.popleft()
            deltas += self._update(step, self.runner.finish(step))
        # All outputs have finished: the steps in flight only compute wasted tokens.
        if self._in_flight and not self._outputs:
            self.drain()
        return deltas

    def drain(self) -> None:
        """Wait for all steps in flight; the next `step` returns their deltas."""
        while self._in_flight:
            step = self._in_flight.popleft()
            self._undelivered += self._update(step, self.runner.finish(step))
        while self._join_work:
            self._join_work.popleft().result()

    def _schedule(self) -> Iterator[tuple[SchedulerOutput, SharedStep | None]]:
        """Yield the steps to launch now.

        Data-parallel ranks that share experts run in lockstep: before each step they agree on the
        largest number of tokens and on whether the step runs as a graph. A rank without tokens
        joins the step.
        """
        propose = None if self.proposer is None else self._propose
        # Peers must call the all-reduce of `_agree` equally often, so with them the loop ends only
        # on the agreed value, never on the local schedule.
        for _ in range(self._max_in_flight):
            scheduler_output = shared = None
            if not self.paused and len(self._in_flight) < self._max_in_flight:
                scheduler_output = self.scheduler.schedule(propose, stages=self.link.count)
            if self._expert_peers is not None:
                shared = self._agree(scheduler_output, self._expert_peers)
                if not shared.max_tokens:
                    return
            if scheduler_output is not None:
                if self._in_flight and not self._in_flight[-1].work.done:
                    self.stats.overlapped += 1
                yield scheduler_output, shared
            elif shared is None:
                return
            else:
                self._join(shared)

    def _agree(self, scheduler_output: SchedulerOutput | None, peers: Group) -> SharedStep:
        """Return the properties of the next step of all ranks that share experts."""
        local_values = [0, 0]
        if scheduler_output is not None:
            graphs = self.runner.graphs
            eager = graphs is None or not graphs.supports(scheduler_output)
            local_values = [len(scheduler_output.tokens), eager]
        max_tokens, eager = all_reduce(torch.tensor(local_values), peers, op="max").tolist()
        return SharedStep(max_tokens, bool(eager))

    def _join(self, shared: SharedStep) -> None:
        """Launch the experts of this rank in a step of the other replicas."""
        self._join_work.append(self.runner.submit_join(shared))
        self.joined += 1
        if len(self._join_work) > self._max_in_flight:
            self._join_work.popleft().result()

    def _propose(self, max_drafts: Sequence[tuple[SequenceState, int]]) -> list[Sequence[int]]:
        """Return drafts for (sequence, largest number of drafts) pairs."""
        return self.runner.propose([(self._outputs[seq], count) for seq, count in max_drafts])

    def _update(self, step: StepInFlight, finished: FinishedStep) -> list[OutputDelta]:
        """Commit a finished step: append its tokens to the outputs, and end finished outputs."""
        # `commit` appends the accepted drafts, so it precedes the outputs' sampled tokens.
        pairs = zip(step.seqs, finished.chosen, strict=True)
        accepted = {seq: choice.accepted for seq, choice in pairs if choice.accepted}
        self.scheduler.commit(step.scheduler_output, accepted)
        for entry, values in zip(step.prompt_logprobs, finished.prompt_logprobs, strict=True):
            entry.append_to_output(values)
        deltas = []
        for n, (seq, choice) in enumerate(zip(step.seqs, finished.chosen, strict=True)):
            output = self._outputs.get(seq)
            if output is None:  # finished or aborted while the step ran
                self.stats.wasted += len(choice.tokens)
                continue
            delta = output.append(choice, self.epoch)
            deltas.append(delta)
            if delta.finish_reason:
                self._end(output)
                continue
            if output.request.forced is not None:
                output.update_forced_tokens(output.request.forced)
            # Drafts of the next step, from the model's own layers.
            if self.runner.num_predicted:
                output.predicted = finished.drafts[n]
        return deltas

    def _end(self, output: OutputState) -> None:
        """Forget an output and free its cache entries."""
        self.scheduler.remove(output.seq)
        del self._outputs[output.seq]
        self._num_unfinished[output.request_id] -= 1
        if not self._num_unfinished[output.request_id]:
            del self._num_unfinished[output.request_id]


def generate(engine: Engine, requests: Iterable[EngineRequest]) -> list[list[Completion]]:
    """Generate until all requests have finished; return the outputs of each request.

    Raises:
        ValueError: the engine cannot serve a request. No request has been added then.
    """
    requests = list(requests)
    limits = {"max_length": engine.config.max_model_len, "vocab_size": engine.vocab_size}
    for number, request in enumerate(requests, 1):
        try:
            check_request(request, **limits)
        except ValueError as error:
            raise ValueError(f"request {number} of {len(requests)}: {error}") from None
    ids = [engine.add(request) for request in requests]
    outputs = Completions()
    while engine.unfinished:
        outputs.add(engine.step())
    return [[outputs[n, i] for i in range(r.n)] for n, r in zip(ids, requests, strict=True)]
