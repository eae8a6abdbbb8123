# SPDX-License-Identifier: Apache-2.0
"""The inference engine: continuous batching over a paged cache (Yu et al. 2022, "Orca").

Requests may be added and aborted at any time; every `step` computes the next tokens of all that
run. A step is planned by the scheduler on the host, its numbers go to the device in one copy, the
model computes the new tokens of all rows packed, [t, 1, h], and one token is chosen for each row
that has caught up:

    >>> shapes = CacheShapes.of(model.modules(), torch.float32)
    >>> config = EngineConfig(num_blocks=64, max_rows=16)
    >>> engine = Engine(model, config, shapes=shapes, vocab_size=model.config.vocab_size)
    >>> engine.add(Request(prompt=(5, 6, 7), max_new_tokens=20))
    0
    >>> while engine.unfinished:
    ...     completions = engine.step()
    >>> len(completions[0].tokens)
    20

What a request yields is a function of its own prompt, parameters, seed and identity, up to the
rounding of matrix products of another batch size: neither its neighbours nor chunks, preemption,
the prefix cache or steps that are planned ahead change it. With tensor parallelism every rank runs
an engine of its own, is told the same requests, sees the same logits and so chooses the same
tokens; no token is communicated. With pipeline parallelism the last stage chooses and tells the
others (`stages`), and as many steps are in flight as there are stages, each of other rows.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
from megatron.core.inference.requests import Completion, Request, check_request
from megatron.core.inference.sampling import (
    Chosen,
    Sampled,
    SampleRow,
    sample,
    verified,
)
from megatron.core.inference.scheduler import (
    BatchPlan,
    CacheStats,
    DraftLength,
    Row,
    Scheduler,
    SharedStep,
)
from megatron.core.inference.sizes import CacheSizes, EngineConfig
from megatron.core.inference.speculation import ComputedStep, DraftContext, Proposer, SampledRow
from megatron.core.inference.stages import (
    PipelineGroups,
    StageLink,
    StepResult,
    packed,
    unpacked,
)
from megatron.core.moe.dispatch import MOST_PADDED
from megatron.core.ops.paged_attention import PagedBatch
from megatron.core.ops.sampling.reference import most_probable
from megatron.core.ops.sequences import Sequences
from megatron.core.process_groups import Group

#: Tokens that a grammar forces, of one step at most.
MOST_FORCED = 32

#: Returns drafts after what a step has chosen, of its layout, its hidden states and the choice.
_Predict = Callable[[SequenceLayout, Tensor, Sampled | None], Sequence[Sequence[int]]]

#: Rows of logits that are made at a time where those of a whole prompt are wanted.
LOGIT_ROWS = 256


class Head(Protocol):
    """Hidden states to logits; `megatron.core.tensor_parallel.VocabParallelHead` is one."""

    def gathered(self, hidden: Tensor) -> Tensor:
        """Bring what the model returned of this rank's tokens to those of all, [s, b, h]."""

    def project(self, hidden: Tensor) -> Tensor:
        """Map hidden states [s, b, h] to this rank's logits [s, b, V/tp]."""

    def whole(self, logits: Tensor) -> Tensor:
        """Gather them to fp32 [s, b, V], the same on every rank, without padding columns."""

    def write_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write what `whole` makes of `project` to `out` [s, b, V], and return it."""


class LanguageModel(Protocol):
    """What the engine asks of a model; `megatron.core.models.gpt.GPTModel` is one.

    With pipeline stages it is this rank's part, and `head` is asked for on the last stage alone.
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
        """Map new tokens [1, t] of several rows to hidden states [t, 1, h], those of this rank
        under sequence parallelism.

        `layout.paged` says whose they are, and where the cache keeps what was before them.
        `hidden_states` are those of the pipeline stage before, None on the first.
        """
        ...

    def boundary_shape(self, tokens: Tensor) -> Sequence[int]:
        """Return the shape of the hidden states of tokens [1, t] between two pipeline stages."""
        ...

    def join_experts(self, most_tokens: int) -> None:
        """Take part in the collectives of experts in a step of other data-parallel ranks, of which
        one has so many new tokens; this one has none. Asked for with `EngineFeatures.expert_peers`.
        """
        ...

    def weights_replaced(self) -> None:
        """Make anew what is derived from the weights."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineFeatures:
    """What an engine does besides taking eager steps on the ranks of one pipeline stage.

    Args:
        proposer: where drafts come from; None if none are wanted.
        pipeline: the stages, which all make their engines together; None for one.
        make_recorder: makes what records decode steps, `CudaRecorder` on a GPU, `CpuGraph` on a
            CPU; None runs all steps eagerly.
        check_plans: ranks that compare their plans before each step; None compares nothing.
        expert_peers: ranks of several data-parallel replicas that share experts, as a group of
            hosts (`ProcessGroupCollection.host_group`). They call `step` equally often, and one
            without work takes part in the collectives of experts. None where each replica has all
            experts.
    """

    proposer: Proposer | None = None
    pipeline: PipelineGroups | None = None
    make_recorder: Callable[[], Recorder] | None = None
    check_plans: Group | None = None
    expert_peers: Group | None = None

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError for features that do not go together."""
        stages = 1 if self.pipeline is None else self.pipeline.stages.size
        count = config.num_speculative_tokens
        if config.asynchronous and stages > 1:
            raise ValueError(
                f"a pipeline of {stages} stages has as many steps in flight: leave asynchronous "
                "scheduling out"
            )
        if self.proposer is not None and self.proposer.stage != "every" and config.asynchronous:
            raise ValueError(
                f"num-speculative-tokens is {count} with asynchronous steps: drafts of a model "
                "follow tokens that are known when a step ends: use n-grams, or drop one"
            )
        if self.make_recorder is not None and stages > 1:
            raise ValueError(
                f"a recorded step exchanges nothing with the {stages} stages of a pipeline: drop "
                "make_recorder or the stages"
            )
        if count < 0 or (count > 0) != (self.proposer is not None):
            given = "without" if self.proposer is None else "with"
            raise ValueError(
                f"num-speculative-tokens is {count} {given} a proposer of drafts: give a positive "
                "number and a proposer, or neither"
            )


@dataclass(eq=False)
class _Output:
    """A row and what it is for.

    Args:
        row, request: what runs, and what was asked.
        completion: what was generated.
        noted: log-probabilities of the prompt that steps have computed or are computing.
        predicted: drafts after the row's tokens that the last step for it has computed.
    """

    row: Row
    request: Request
    completion: Completion
    noted: int = 0
    predicted: Sequence[int] = ()
    _masks: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)

    @property
    def sequence(self) -> int:
        """Identity in random draws."""
        return self.request.sequence + self.completion.index

    @property
    def position(self) -> int:
        """Where the next token will be; while steps that choose one are in flight, that of the last
        of these."""
        return len(self.row.tokens) + max(self.row.pending, 1) - 1

    def sample_row(self, drafts: Sequence[int] = (), position: int | None = None) -> SampleRow:
        """Return how the token after some drafts is chosen, of which the first is at `position`,
        None for that of now."""
        tokens = [*self.completion.tokens, *drafts] if drafts else self.completion.tokens
        return SampleRow(
            params=self.request.sampling,
            sequence=self.sequence,
            position=(self.position if position is None else position) + len(drafts),
            prompt=self.request.prompt,
            output=tokens,
            mask=None if self.request.mask is None else self._mask(drafts),
        )

    def context(self, count: int) -> DraftContext:
        """Return what a proposer needs to know for so many drafts."""
        return DraftContext(
            row=self.row,
            request=self.request,
            generated=self.completion.tokens,
            sequence=self.sequence,
            count=count,
            predicted=self.predicted,
        )

    def sampled_row(self) -> SampledRow:
        """Return what drafts need that are computed in a step that is being launched. A row whose
        tokens they depend on gets none until the step ends."""
        position = self.position
        return SampledRow(
            count=self.row.draft_length.next,
            left=self.row.max_tokens - position,
            stop_tokens=self.request.stop_tokens,
            sample_row=lambda tokens: self.sample_row(tokens, position),
        )

    def allowed(self, drafts: Sequence[int]) -> Sequence[int]:
        """Return the drafts before the first that ends the row or that its mask excludes: a mask is
        never asked what follows such a token."""
        for n, draft in enumerate(drafts):
            mask = self._mask(drafts[:n])
            if draft in self.request.stop_tokens or (mask is not None and not mask[draft]):
                return drafts[:n]
        return drafts

    def append(self, chosen: Chosen, epoch: int) -> None:
        """Take what a step chose; the row has its accepted drafts already."""
        completion, count = self.completion, self.request.sampling.logprobs
        completion.cached_tokens = self.row.cached or 0
        for token in chosen.tokens[chosen.accepted :]:
            self.row.append(token)
        completion.tokens += chosen.tokens
        completion.logprobs += chosen.logprobs
        completion.epochs += [epoch] * len(chosen.tokens)
        if count:
            completion.top_logprobs += [top[:count] for top in chosen.tops]
        self._masks.clear()

    def foresee(self, forced: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Find the tokens that have to follow, by what the request has for that."""
        self.row.forced = tuple(self.allowed(forced(self.completion.tokens)[:MOST_FORCED]))

    def end_after(self, chosen: Chosen) -> str:
        """Return why the row ends with what a step chose, which it has not taken yet; "" if it goes
        on."""
        if chosen.error:
            return "error"
        if chosen.tokens[-1] in self.request.stop_tokens:
            return "stop"
        length = len(self.request.prompt) + len(self.completion.tokens) + len(chosen.tokens)
        return "length" if length == self.row.max_tokens else ""

    def _mask(self, drafts: Sequence[int]) -> Tensor | None:
        """Return which tokens may follow some drafts; asked once for each."""
        if self.request.mask is None:
            return None
        key = tuple(drafts)
        if key not in self._masks:
            self._masks[key] = self.request.mask([*self.completion.tokens, *drafts])
        return self._masks[key]


@dataclass(frozen=True, eq=False)
class _Noting:
    """Tokens of a prompt whose log-probabilities a step finds.

    Args:
        output: of whose prompt.
        place: among t, of the token before the first of them.
        following: the tokens.
        tops: alternatives that are reported of each.
    """

    output: _Output
    place: int
    following: list[int]
    tops: int

    @property
    def count(self) -> int:
        """How many numbers are found: see `Engine._prompt_logprobs`."""
        return len(self.following) * (1 + 2 * self.tops)

    def give(self, numbers: Tensor) -> None:
        """Add what was found, fp64 on the host, to the output."""
        completion = self.output.completion
        assert completion.prompt_logprobs is not None
        logprobs, *alternatives = numbers.view(len(self.following), -1).tensor_split(
            [1, 1 + self.tops], dim=1
        )
        completion.prompt_logprobs += logprobs[:, 0].tolist()
        if completion.prompt_top_logprobs is not None:
            ids, tops = alternatives[0].long().tolist(), alternatives[1].tolist()
            pairs = zip(ids, tops, strict=True)
            completion.prompt_top_logprobs += [list(zip(*pair, strict=True)) for pair in pairs]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInFlight:
    """A step that the device computes; `Engine._finish` waits for it.

    Args:
        plan: of the step.
        rows: that get a token.
        choices: places after which a token is chosen, those of drafts included.
        noting: log-probabilities of prompts that it finds.
        tops: alternatives that are reported of each token.
        work: that computes it.
    """

    plan: BatchPlan
    rows: tuple[Row, ...]
    choices: int
    noting: list[_Noting]
    tops: int
    work: Work[StepResult]


class Engine:
    """Generate for requests that come and go.

    Args:
        model: its weights may be those that are trained.
        config: its sizes.
        shapes: what the model keeps of tokens.
        max_length: longest sequence that the model takes; None means no limit.
        vocab_size: of the model, without padding.
        device: where the model is.
        features: what it does besides.

    Raises:
        ValueError: features that do not go together, or more drafts than a step or the cache holds.

    Attributes:
        cache: pages and states.
        scheduler: which rows run.
        epoch: how often the weights have been replaced.
        paused: whether steps compute nothing.
        joined: steps of other replicas in which this one computed experts only, without work.
        model_seconds: that steps have spent in the model, on drafts and in sampling; what else a
            step takes is bookkeeping.
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
        sizes = CacheSizes.agreed(config, shapes, max_length, self.link)
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
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            prefix_caching=config.prefix_caching,
            states=self.cache.states if sizes.has_states else None,
            window=sizes.window,
            token_multiple=config.token_multiple,
        )
        self.epoch, self.joined, self.paused, self.model_seconds = 0, 0, False, 0.0
        predicts = self.proposer is not None and self.proposer.stage == "last"
        self._predicted = config.num_speculative_tokens if predicts else 0  # of a row, at most
        self._outputs: dict[Row, _Output] = {}
        self._next_id = 0
        self._queue = WorkQueue(self.device, in_thread=config.asynchronous)
        self._in_flight: deque[StepInFlight] = deque()  # the oldest first
        self._joins: deque[Work[None]] = deque()  # of `joined`, those that may not be done
        self._most_in_flight = 2 if config.asynchronous else self.link.count
        self._graphs: DecodeGraphs | None = None
        if features.make_recorder is not None:
            self._graphs = self._graphs_by(features.make_recorder)
        self._asleep: HostCopy | None = None
        self._ended: list[Completion] = []  # found outside of `step`, which returns them
        # The newest token of each row by its slot, for steps that are planned before it is known.
        self._newest = torch.zeros(config.max_rows, dtype=torch.int64, device=self.device)

    def _graphs_by(self, make_recorder: Callable[[], Recorder]) -> DecodeGraphs:
        """Return the graphs of decode steps."""
        drafts = 0 if self.cache.shapes.states else self.config.num_speculative_tokens
        rows = self.config.max_rows * (1 + drafts)
        longest = self.cache.num_blocks * self.config.block_size
        shared = self._expert_peers is not None
        most = min(self.config.max_step_tokens, MOST_PADDED if shared else rows)
        return DecodeGraphs(
            self._decoded,
            make_recorder,
            cache=self.cache,
            vocab_size=self.vocab_size,
            max_rows=min(rows, most),  # of more experts the host reads how many each rank has
            row_multiple=self.config.token_multiple,
            max_context=min(longest, self.max_length or longest),
            shares_experts=shared,
        )

    @property
    def asleep(self) -> bool:
        """Whether it is between `sleep` and `wake`."""
        return self._asleep is not None

    @property
    def unfinished(self) -> int:
        """Outputs that have not ended."""
        return len(self._outputs)

    @property
    def graphs(self) -> GraphStats | None:
        """What graphs did; None without them."""
        return None if self._graphs is None else self._graphs.stats

    @property
    def stats(self) -> CacheStats:
        """What the scheduler and the prefix cache did so far."""
        return self.scheduler.stats

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that `add` would not take: the model cannot serve it, the
        cache is too small for it, or the engine is asleep."""
        if self._asleep is not None:
            raise ValueError("the engine is asleep and takes no requests: wake it first")
        check_request(request, max_length=self.max_length, vocab_size=self.vocab_size)
        self.scheduler.check(len(request.prompt) + request.max_new_tokens)

    def add(self, request: Request) -> int:
        """Take a request in and return its id. Raises ValueError as `check` does."""
        self.check(request)
        outputs = []
        for index in range(request.n):
            row = Row(
                tokens=list(request.prompt),
                prompt_length=len(request.prompt),
                max_tokens=len(request.prompt) + request.max_new_tokens,
                priority=request.priority,
                needs_prompt_logits=request.prompt_logprobs and index == 0,
                needs_tokens=request.mask is not None or request.sampling.penalizes,
                draft_length=DraftLength(most=self.config.num_speculative_tokens),
            )
            completion = Completion.begin(request, self._next_id, index)
            outputs.append(_Output(row, request, completion))
        for output in outputs:
            if request.forced is not None:
                output.foresee(request.forced)
            self.scheduler.add(output.row)
            self._outputs[output.row] = output
        self._next_id += 1
        return self._next_id - 1

    def abort(self, request_id: int) -> list[Completion]:
        """End all outputs of a request now; return them. An id that has ended does nothing."""
        mine = [o for o in self._outputs.values() if o.completion.request_id == request_id]
        for output in mine:
            self._end(output, "abort")
        return [output.completion for output in mine]

    def finish(self, request_id: int, index: int) -> None:
        """End one output now, with the reason "stop": the caller saw its end in the text."""
        for output in list(self._outputs.values()):
            if (output.completion.request_id, output.completion.index) == (request_id, index):
                self._end(output, "stop")

    def pause(self, *, keep_cache: bool = True) -> None:
        """Compute nothing until `resume`.

        Args:
            keep_cache: rows go on where they are; else what they have is given up, and computed
                again after `resume`.
        """
        self.paused = True
        self.drain()
        if not keep_cache:
            self.scheduler.preempt_all()
            self.scheduler.forget_cached()

    def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            ValueError: the engine is asleep.
        """
        if self._asleep is not None:
            raise ValueError("the engine is asleep: wake it")
        self.paused = False

    def sleep(self, weights: Iterable[Tensor] = ()) -> None:
        """Give the memory of the cache back, between two steps, and that of weights if they are
        given: a trainer on the same device has it until `wake`. A proposer of drafts does the same
        with its own.

        Rows that run are computed again after that. Asleep, the engine takes no requests.

        Args:
            weights: of the model, kept in the host's memory meanwhile.

        Raises:
            ValueError: it is asleep.
        """
        if self._asleep is not None:
            raise ValueError("the engine is asleep: wake it first")
        self.pause(keep_cache=False)
        given = tuple(weights)
        if self.proposer is not None:
            self.proposer.sleep(weights=bool(given))
        self.cache.give_back()
        if self._graphs is not None:
            self._graphs.forget()
        self._asleep = HostCopy(given)
        give_back_memory(self.device)

    def wake(self) -> None:
        """Go on after `sleep`.

        Raises:
            ValueError: it is awake.
        """
        if self._asleep is None:
            raise ValueError("the engine is awake: only one that sleeps can be woken")
        self._asleep.restore()
        self._asleep = None
        self.cache.allocate()
        if self.proposer is not None:
            self.proposer.wake()
        self.resume()

    def weights_replaced(self) -> None:
        """Take note that the model's weights are others now, between two steps.

        Running rows go on with what they have; nothing computed before is reused for others. Tokens
        from here on carry the new epoch.

        Raises:
            ValueError: a step is in flight, which may have read both: with `asynchronous` or
                pipeline stages, `pause` before weights are written.
        """
        if self._in_flight or (self.config.asynchronous and self._joins):
            raise ValueError(
                "weights were replaced while a step was in flight: pause the engine before they "
                "are written"
            )
        self.epoch += 1
        self.model.weights_replaced()
        if self._graphs is not None:
            self._graphs.weights_replaced()
        self.scheduler.forget_cached()

    def step(self) -> list[Completion]:
        """Compute one step; return the outputs that have a new token or ended, in no order.

        An output is the same object in every step, until it has a `finish_reason`.

        Raises:
            ValueError: with `check_plans`, ranks that plan different steps.
        """
        if self._expert_peers is None:
            while len(self._in_flight) < self._most_in_flight:
                plan = self._planned()
                if plan is None:
                    break
                self._in_flight.append(self._launch(plan))
        else:
            self._launch_with(self._expert_peers)
        found, self._ended = self._ended, []
        if self._in_flight:
            found += self._finish(self._in_flight.popleft())
        if self._in_flight and not self._outputs:  # what is in flight is for nobody
            self.drain()
        return found

    def drain(self) -> None:
        """Wait for all steps in flight; the next `step` returns what they have found."""
        while self._in_flight:
            self._ended += self._finish(self._in_flight.popleft())
        while self._joins:
            self._joins.popleft().result()

    # --- one step ---------------------------------------------------------------------------------

    def _planned(self) -> BatchPlan | None:
        """Plan a step, if there is room for one and something to do."""
        if self.paused or len(self._in_flight) >= self._most_in_flight:
            return None
        propose = None if self.proposer is None else self._propose
        return self.scheduler.schedule(propose, stages=self.link.count)

    def _launch_with(self, peers: Group) -> None:
        """Launch steps together with ranks that share experts, as many as the rank that has most:
        before each, all learn how many tokens that has, and whether all can take it as a graph."""
        for _ in range(self._most_in_flight):
            plan, own = self._planned(), [0, 0]
            if plan is not None:
                own = [len(plan.tokens), self._graphs is None or not self._graphs.takes(plan)]
            most, eager = all_reduce(torch.tensor(own), peers, op="max").tolist()
            if not most:
                return
            shared = SharedStep(most, bool(eager))
            if plan is not None:
                self._in_flight.append(self._launch(plan, shared))
                continue
            self._joins.append(self._queue.submit(functools.partial(self._join, shared)))
            self.joined += 1
            if len(self._joins) > self._most_in_flight:
                self._joins.popleft().result()

    @torch.no_grad()
    def _join(self, shared: SharedStep) -> None:
        """Compute the experts of a step of other replicas, without tokens of this one."""
        if self._graphs is None or shared.eager:
            self.model.join_experts(shared.most_tokens)
        else:
            self._graphs.join(shared.most_tokens)

    def _launch(self, plan: BatchPlan, shared: SharedStep | None = None) -> StepInFlight:
        """Put a step on the device: the model, the choice of tokens, and copies to the host; with
        pipeline stages, this one's part of it. `shared` is given where other replicas share
        experts."""
        if self._in_flight and not self._in_flight[-1].work.done:
            self.stats.overlapped += 1
        rows = tuple(plan.rows[n] for n in plan.sampled)
        asked = [
            self._outputs[row].sample_row(row.drafts[:count])
            for row in rows
            for count in range(len(row.drafts) + 1)
        ]
        tops = min(max((one.params.logprobs or 0 for one in asked), default=0), self.vocab_size)
        noting = self._noting(plan)
        predict = None
        if self._predicted and self.link.is_last:
            sampled = [self._outputs[row].sampled_row() for row in rows]
            predict = functools.partial(
                self._predict, plan, plan.following(self._predicted), sampled
            )
        # What is found is numbers of a known count, which other stages may expect beforehand.
        count = len(asked) * (3 + 2 * tops) + sum(note.count for note in noting)
        count += len(rows) * self._predicted
        start, idle = time.perf_counter(), self.link.idle_seconds
        work = self._queue.submit(
            lambda: self._compute(plan, asked, noting, predict, count, shared)
        )
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        return StepInFlight(
            plan=plan, rows=rows, choices=len(asked), noting=noting, tops=tops, work=work
        )

    def _finish(self, step: StepInFlight) -> list[Completion]:
        """Wait for the oldest step in flight; return the outputs that it has added to."""
        start, idle = time.perf_counter(), self.link.idle_seconds
        result = step.work.result()
        for pending in result.sends:
            self.link.wait(pending)
        sampled, logprobs, drafts = result.sampled, result.prompt_logprobs, result.drafts
        if result.results is not None:
            sampled, logprobs, drafts = unpacked(
                self.link.wait(result.results).cpu(),
                rows=step.choices,
                tops=step.tops,
                prompts=[note.count for note in step.noting],
                drafts=(len(step.rows), self._predicted),
            )
        drafted = [step.plan.drafts[n] for n in step.plan.sampled]
        chosen = [] if sampled is None else verified(sampled, drafted)
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        pairs = zip(step.rows, chosen, strict=True)
        self.scheduler.commit(step.plan, {row: found.accepted for row, found in pairs})
        for note, found in zip(step.noting, logprobs, strict=True):
            note.give(found)
        completions = self._record(step.rows, chosen)
        if self._predicted:
            for row, predicted in zip(step.rows, drafts, strict=True):
                if row in self._outputs:
                    self._outputs[row].predicted = predicted
        return completions

    # Not inference_mode: buffers that weights are gathered in would be of no use to training.
    @torch.no_grad()
    def _compute(
        self,
        plan: BatchPlan,
        asked: Sequence[SampleRow],
        noting: Sequence[_Noting],
        predict: _Predict | None,
        count: int,
        shared: SharedStep | None,
    ) -> StepResult:
        """Compute a step, in which so many numbers are found. May run in another thread: reads no
        row, output or scheduler."""
        if self._check_plans is not None:
            self.link.require_same_plan(plan, self._check_plans)
        self.cache.states.copy(plan.state_copies)
        if self._graphs is not None and self._graphs.launches(plan, shared):
            hidden, logits = self._graphs(plan, shared)
            sampled = sample(self._taken(logits, plan.chosen_after), asked)
            kept, drafts = self._kept(plan, sampled), []
            if predict is not None:
                drafts = predict(self._placed(plan)[1], hidden, sampled)
            return StepResult(sampled=kept, drafts=drafts)
        results = None
        if count and not self.link.is_last:
            results = self.link.expect_results(count)
        tokens, layout = self._placed(plan, shared)
        hidden = self._hidden(tokens, layout)
        if not self.link.is_last:
            return StepResult(results=results, sends=self.link.send_hidden(hidden))
        notes, sampled, drafts = [self._prompt_logprobs(note, hidden) for note in noting], None, []
        if asked:
            sampled = sample(self.logits(self._taken(hidden, plan.chosen_after)), asked)
        kept = None if sampled is None else self._kept(plan, sampled)
        if predict is not None:
            drafts = predict(layout, hidden, sampled)
        sends: Sequence[Pending] = ()
        if count and self.link.count > 1:  # the others are told what was found
            sends = self.link.send_results(packed(sampled, notes, drafts, most=self._predicted))
        found = [to_host(note) for note in notes]
        return StepResult(sampled=kept, prompt_logprobs=found, drafts=drafts, sends=sends)

    def _predict(
        self,
        plan: BatchPlan,
        following: Sequence[Sequence[int]],
        rows: Sequence[SampledRow],
        layout: SequenceLayout,
        hidden: Tensor,
        sampled: Sampled | None,
    ) -> Sequence[Sequence[int]]:
        """Return the drafts that a proposer computes of a step; the host waits for what the step
        has chosen."""
        assert self.proposer is not None
        drafted = [plan.drafts[n] for n in plan.sampled]
        chosen = [] if sampled is None else verified(sampled, drafted)
        step = ComputedStep(
            plan=plan,
            layout=layout,
            hidden=hidden,
            cache=self.cache,
            logits=self.logits,
            following=following,
            rows=rows,
            chosen=[found.tokens for found in chosen],
            accepted=[found.accepted for found in chosen],
            counts=[
                0 if found.error else row.drafts_after(found.tokens)
                for found, row in zip(chosen, rows, strict=True)
            ],
        )
        return self.proposer.predict(step)

    def _kept(self, plan: BatchPlan, sampled: Sampled) -> Sampled:
        """Keep the tokens for steps that are planned already; return them on the host."""
        if self.config.asynchronous:
            tokens = sampled.tokens
            if any(plan.drafts):  # nothing is planned after those: any of theirs will do
                counts = [1 + len(plan.drafts[n]) for n in plan.sampled]
                tokens = tokens[self._index(np.cumsum(counts) - 1)]
            self._newest[self._index(np.array(plan.sampled_slots))] = tokens
        return sampled.on_host()

    def _known(self, tokens: Tensor) -> Tensor:
        """Return tokens int64 [t] of a plan, those of steps before that are known by now too."""
        return tokens.where(tokens >= 0, self._newest[(-1 - tokens).clamp_(min=0)])

    def _decoded(self, inputs: DecodeInputs, logits: Tensor) -> Tensor:
        """Return the hidden states [b, 1, h] of a step that is recorded; write its logits, fp32 [b,
        V]."""
        tokens = inputs.tokens.long()
        tokens = self._known(tokens) if self.config.asynchronous else tokens
        layout = SequenceLayout(inputs.positions.long(), paged=inputs.paged)
        hidden = self._hidden(tokens, layout)
        self.model.head.write_logits(hidden, logits[:, None])
        return hidden

    def _propose(self, asked: Sequence[tuple[Row, int]]) -> list[Sequence[int]]:
        """Return drafts for rows, each with the number that it may have."""
        assert self.proposer is not None
        start = time.perf_counter()
        outputs = [self._outputs[row] for row, _ in asked]
        # A token that a step in flight chooses is guessed as well: its drafts follow the guess.
        pending = [row.pending for row, _ in asked]
        contexts = [
            output.context(guesses + count)
            for output, guesses, (_, count) in zip(outputs, pending, asked, strict=True)
        ]
        found, idle = self.proposer.propose(contexts), self.link.idle_seconds
        if self.proposer.stage == "first":
            found = self.link.of_first(found, max(context.count for context in contexts))
        self.model_seconds += time.perf_counter() - start - (self.link.idle_seconds - idle)
        return [
            output.allowed(drafts)[guesses:]
            for output, guesses, drafts in zip(outputs, pending, found, strict=True)
        ]

    def _placed(
        self, plan: BatchPlan, shared: SharedStep | None = None
    ) -> tuple[Tensor, SequenceLayout]:
        """Return the new tokens of a step, int64 [t], on the device, and where they are."""
        wide = plan.tokens, plan.positions, plan.slot_mapping, plan.state_slots
        narrow = plan.query_bounds, plan.context_lengths, plan.block_table
        tokens, positions, slots, states, *others = self._moved(wide, narrow)
        bounds, contexts, table = others
        if plan.tokens.min() < 0:
            tokens = self._known(tokens)
        decode = plan.decode_rows + plan.padding
        prefill = None
        if plan.decode_rows < len(plan.rows):
            ends = (plan.query_bounds[decode:] - decode).tolist()
            prefill = Sequences(ends, device=self.device)
        paged = PagedRows(
            batch=PagedBatch(
                block_table=table,
                query_bounds=bounds,
                context_lengths=contexts,
                max_query=max(plan.counts),
                max_context=int(plan.context_lengths.max()),
                cpu_dtype=self.cache.shapes.cpu_dtype,
            ),
            slot_mapping=slots,
            state_slots=states,
            decode_rows=decode,
            prefill=prefill,
            most_tokens=None if shared is None else shared.most_tokens,
        )
        return tokens, SequenceLayout(positions, paged=paged)

    def _hidden(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the hidden states [t, 1, h] of new tokens, int64 [t], before the last pipeline
        stage as they pass on."""
        tokens, before = tokens.unsqueeze(0), {}
        if not self.link.is_first:
            shape = self.model.boundary_shape(tokens)
            before["hidden_states"] = self.link.receive_hidden(shape)
        hidden = self.model(tokens, layout=layout, cache=self.cache, **before)
        return self.model.head.gathered(hidden) if self.link.is_last else hidden

    def _moved(
        self, wide: Sequence[np.ndarray], narrow: Sequence[np.ndarray]
    ) -> tuple[Tensor, ...]:
        """Return integer arrays on the device, some as int64 and the others as int32, brought there
        in one copy."""
        flat = np.concatenate([array.reshape(-1) for array in wide]).astype(np.int64)
        flat = np.concatenate([flat.view(np.int32), *(array.reshape(-1) for array in narrow)])
        there = pin(torch.from_numpy(flat), self.device).to(self.device, non_blocking=True)
        sizes = [2 * array.size for array in wide] + [array.size for array in narrow]
        parts = there.split_with_sizes(sizes)
        return (
            *(part.view(torch.int64) for part in parts[: len(wide)]),
            *(p.view(a.shape) for p, a in zip(parts[len(wide) :], narrow, strict=True)),
        )

    def _taken(self, hidden: Tensor, places: np.ndarray) -> Tensor:
        """Return [n, 1, h], the hidden states of some tokens."""
        if len(places) == hidden.shape[0]:
            return hidden
        return hidden.index_select(0, self._index(places))

    def _index(self, places: np.ndarray) -> Tensor:
        """Return int64 numbers on the device."""
        index = torch.from_numpy(places.astype(np.int64))
        return pin(index, self.device).to(self.device, non_blocking=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [n, V] of hidden states [n, 1, h]."""
        head = self.model.head
        return head.whole(head.project(hidden))[:, 0]

    def _record(self, rows: Sequence[Row], chosen: Sequence[Chosen]) -> list[Completion]:
        """Append a step's tokens to their outputs, and end those that are at their end."""
        completions = []
        for row, found in zip(rows, chosen, strict=True):
            output = self._outputs.get(row)
            if output is None:  # it ended while the step ran
                self.stats.wasted += len(found.tokens)
                continue
            completions.append(output.completion)
            reason = output.end_after(found)
            output.append(found, self.epoch)
            if reason:
                self._end(output, reason)
            elif output.request.forced is not None:
                output.foresee(output.request.forced)
        return completions

    def _noting(self, plan: BatchPlan) -> list[_Noting]:
        """Return which log-probabilities of prompts a step finds."""
        found = []
        for n, (row, start) in enumerate(zip(plan.rows, plan.starts, strict=True)):
            if not row.needs_prompt_logits:
                continue
            output = self._outputs[row]
            place = int(plan.query_bounds[plan.place(n)])
            last = min(row.prompt_length - 1, start + plan.counts[n])
            # A row that is computed again has them from the first time.
            if output.noted < last:
                following = row.tokens[output.noted + 1 : last + 1]
                tops = min(output.request.sampling.logprobs or 0, self.vocab_size)
                found.append(_Noting(output, place + output.noted - start, following, tops))
                output.noted = last
            if output.noted == row.prompt_length - 1:
                row.needs_prompt_logits = False
                self._share_prompt_logprobs(output)
        return found

    def _prompt_logprobs(self, note: _Noting, hidden: Tensor) -> Tensor:
        """Return fp64 [c (1 + 2k)]: of each token that is noted its log-probability, then the ids
        and the log-probabilities of its k alternatives."""
        parts = []
        for first in range(0, len(note.following), LOGIT_ROWS):
            tokens = torch.tensor(note.following[first : first + LOGIT_ROWS], device=hidden.device)
            states = hidden[note.place + first :][: len(tokens)]
            wide = self.logits(states).log_softmax(-1)  # [c, V]
            columns = [wide.gather(1, tokens[:, None])]
            if note.tops:
                columns += most_probable(wide, [note.tops] * len(tokens))
            parts.append(torch.cat([column.double() for column in columns], 1))
        return torch.cat(parts).flatten()

    def _share_prompt_logprobs(self, output: _Output) -> None:
        """Give the other outputs of a request what the first found of the prompt they share."""
        mine = output.completion
        for other in self._outputs.values():
            theirs = other.completion
            if theirs.request_id == mine.request_id and theirs is not mine:
                theirs.prompt_logprobs = mine.prompt_logprobs
                theirs.prompt_top_logprobs = mine.prompt_top_logprobs

    def _end(self, output: _Output, reason: str) -> None:
        """Finish an output and free what it has."""
        output.completion.finish_reason = reason
        self.scheduler.remove(output.row)
        del self._outputs[output.row]


def generate(engine: Engine, requests: Iterable[Request]) -> list[list[Completion]]:
    """Generate for requests until all have ended; return the outputs of each.

    Raises:
        ValueError: one that the engine cannot serve; none is added then.
    """
    requests = list(requests)
    for place, request in enumerate(requests, 1):
        try:
            check_request(request, max_length=engine.max_length, vocab_size=engine.vocab_size)
        except ValueError as error:
            raise ValueError(f"request {place} of {len(requests)}: {error}") from None
    ids = [engine.add(request) for request in requests]
    done: dict[int, dict[int, Completion]] = {n: {} for n in ids}
    while engine.unfinished:
        for completion in engine.step():
            done[completion.request_id][completion.index] = completion
    return [[done[n][i] for i in range(r.n)] for n, r in zip(ids, requests, strict=True)]
