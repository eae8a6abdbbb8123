# SPDX-License-Identifier: Apache-2.0
"""Which tokens of which requests the next step computes, and where it keeps them.

The scheduler knows no tensor and no model: requests go in, `schedule` returns a `BatchPlan`,
`commit` takes what the step found. So it can be tested by itself, and ranks that are told the same
requests plan the same steps.

A step may be planned while those before it are in flight: planned and not yet committed. Such a row
has tokens that are being computed (`Row.in_flight`) and perhaps one that is being chosen
(`Row.pending`).

A step serves the rows that run, the oldest first, then admits waiting ones; a row of lower
`priority` number counts as older than all rows of higher ones. A row computes all of
its tokens that are not in the cache yet, as far as the step's token budget goes (chunked prefill,
Agrawal et al. 2023, arXiv 2308.16369); a row that has caught up computes its newest token and gets
the next. Blocks are allocated as rows grow. Where none is left, the youngest row gives up all of
its blocks and waits to be computed again (recomputation, Kwon et al. 2023, section 4.5); the oldest
one therefore always goes on, and every request that fits the cache alone comes to its end.

Rows find the blocks of earlier rows that began alike (`blocks`). Recurrent mixers need the state at
the border as well, so states are copied to slots of their own (snapshots) at several borders of a
prompt: spread evenly, at its last block, and where a waiting request parts from it; and at the last
border of what is generated. The least recently used snapshot makes room. A request whose next block
is about to be computed for another one waits for it.

Most steps are like the step before: every row that runs has one new token again. Such a step is
the plan of the last one, moved on by a place; only rows that enter or fill a block are looked at.

With speculative decoding, what is left of a step's tokens and of the free blocks goes to drafts:
tokens that may follow the newest ones of a row. They delay and preempt nobody. `commit` is told how
many were accepted; of the others nothing stays: neither blocks nor digests, and states are those of
before the step, so the accepted ones are computed again with the next. Until then nothing else is
planned for the row: its next place is not known. Tokens that a grammar forces are drafts too, with
or without speculative decoding.
"""

from __future__ import annotations

import hashlib
import math
from bisect import insort_left, insort_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron.core.inference.blocks import BlockPool, block_digests
from megatron.core.inference.cache import StateCache
from megatron.core.inference.requests import RequestError

#: Snapshots of states that are spread over one prompt.
SNAPSHOTS_PER_PROMPT = 10

#: Drafts of a step go on while the last of them is accepted with at least this chance.
LAST_CHANCE = 0.25

#: With less than this chance a row rests from drafts, for at most so many steps at a time.
LEAST_CHANCE, LONGEST_REST = 0.2, 32


@dataclass(kw_only=True)
class DraftLength:
    """How many drafts a row has in its next step, by what was accepted before.

    With an estimated chance c that a draft is accepted after accepted ones, the largest k for which
    c^k is at least `LAST_CHANCE`. Where c is below `LEAST_CHANCE`, as it is when the first two
    steps accept none, a single draft looks whether this has changed after 4, 8, ...
    `LONGEST_REST` steps.

    Args:
        most: drafts at most.
        chance: mean over drafts up to the first that was rejected; a running one after ten.
        trials: drafts that this is a mean of.
        failures: steps without an accepted draft since the row rests.
        rest: steps without drafts that are left.
    """

    most: int = 0
    chance: float = 0.5
    trials: int = 0
    failures: int = 0
    rest: int = 0

    @property
    def next(self) -> int:
        """Drafts of the next step at most."""
        if self.rest:
            return 0
        return min(self.most, max(1, int(math.log(LAST_CHANCE) / math.log(self.chance))))

    def update(self, drafted: int, accepted: int) -> None:
        """Take note of a step."""
        if not drafted:
            self.rest = max(0, self.rest - 1)
            return
        for agreed in [1] * accepted + [0] * (accepted < drafted):
            self.trials += 1
            self.chance += max(0.1, 1 / (self.trials + 1)) * (agreed - self.chance)
        # One draft that is accepted suffices to go on with them.
        self.chance = min(max(self.chance, 0.15), 0.99)
        if self.chance < LEAST_CHANCE:
            self.failures += 1
            self.rest = min(LONGEST_REST, 2 ** (1 + self.failures))
        else:
            self.failures = 0


#: Drafts for rows, each at most as many as the number next to it; they follow the tokens that are
#: known and the one that is pending.
Propose = Callable[[Sequence[tuple["Row", int]]], Sequence[Sequence[int]]]


@dataclass(eq=False)
class Row:
    """A sequence on its way: waiting, or running in a slot.

    Args:
        tokens: of the prompt, and those generated so far.
        prompt_length: how many are the prompt's.
        max_tokens: tokens it may have at the end.
        priority: rows with a lower number are served first, and preempted last.
        needs_prompt_logits: the logits of all prompt tokens are wanted: none is taken from the
            prefix cache.
        needs_tokens: the host needs its tokens to choose the next, as penalties and masks do: no
            step is planned for it while another chooses one.

    Attributes:
        computed: tokens whose keys, values and states are in the cache.
        in_flight: tokens after these that steps in flight compute.
        pending: new tokens that steps in flight choose; they follow `tokens`.
        admission: how often it has begun to run; steps of an earlier time do not count for it.
        cached: tokens of the prompt that were found in the prefix cache when it first ran.
        slot: of the block table while it runs, else -1.
        state_slot: of the states while it runs, -1 for a model without any.
        blocks: its blocks by place; -1 where a sliding window no longer sees one.
        digests: of its full blocks.
        borders: tokens after which states are to be copied.
        shares: what it computes may be reused for others; not once the weights were replaced under
            it, as its later keys, values and states come from those of the weights before.
        forced: tokens that have to follow those known: drafts of the next step.
        drafts: that a step in flight verifies.
        draft_length: how many the next step may have.
        saved_slot: of the states before the drafts, while a step verifies them; else -1.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    priority: int = 0
    needs_prompt_logits: bool = False
    needs_tokens: bool = False
    computed: int = 0
    in_flight: int = 0
    pending: int = 0
    admission: int = 0
    cached: int | None = None
    slot: int = -1
    state_slot: int = -1
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    borders: set[int] = field(default_factory=set)
    shares: bool = True
    forced: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    draft_length: DraftLength = field(default_factory=DraftLength)
    saved_slot: int = -1
    _latest_snapshot: bytes | None = None
    _reserved: dict[int, int] = field(default_factory=dict)  # border in flight -> snapshot slot

    @property
    def planned(self) -> int:
        """Tokens that are in the cache once the steps in flight have ended."""
        return self.computed + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens that no step was planned for yet."""
        return len(self.tokens) + self.pending - self.planned

    @property
    def waits(self) -> bool:
        """Whether nothing can be planned before a step in flight has chosen a token."""
        is_last = len(self.tokens) + self.pending >= self.max_tokens
        return self.pending > 0 and (self.needs_tokens or is_last or bool(self.drafts))

    def append(self, token: int) -> None:
        """Take a token that a step has chosen."""
        self.tokens.append(token)
        self.pending -= 1


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchPlan:
    """One step of an engine: rows with t new tokens, packed; those with one token come first.

    Rows of padding follow these: they have one token each and no context, and write nothing. With
    them there are b rows.

    Args:
        rows: whose tokens they are, without padding.
        counts: new tokens of each row, drafts included.
        drafts: the last of these, of each row.
        starts: tokens of each row that are in the cache before this step.
        admissions: of each row.
        decode_rows: how many rows have one.
        padding: how many rows of padding there are.
        tokens, positions: int32 [t]; a token that a step in flight chooses is -1 less the slot of
            its row.
        query_bounds: int32 [b + 1], where each row's new tokens begin.
        context_lengths: int32 [b], tokens of each row in the cache after this step.
        block_table: int32 [b, w]; 0 where a row has no block, which nothing reads.
        slot_mapping: int32 [t], the place in the cache that each new token takes; -1 of padding.
        state_slots: int32 [b]; -1 of padding and of models without states.
        state_copies: before the step, copies of states from slot to slot, in this order; from None
            are zeros.
        sampled: which rows have all of their tokens computed by this step and so get new ones.
        sampled_slots: the slot of each of these, a number of its own for each row that runs.
    """

    rows: tuple[Row, ...]
    counts: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    admissions: tuple[int, ...]
    decode_rows: int
    padding: int
    tokens: np.ndarray
    positions: np.ndarray
    query_bounds: np.ndarray
    context_lengths: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    state_slots: np.ndarray
    state_copies: tuple[tuple[int | None, int], ...]
    sampled: tuple[int, ...]
    sampled_slots: tuple[int, ...]

    def place(self, row: int) -> int:
        """Return which of the b rows in the arrays `rows[row]` is."""
        return row if row < self.decode_rows else row + self.padding

    def following(self, most: int) -> list[list[int]]:
        """Return of each row the tokens after those of this step, at most so many, that are known
        when it is launched."""
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        return [row.tokens[end : end + most] for row, end in zip(self.rows, ends, strict=True)]

    @cached_property
    def chosen_after(self) -> np.ndarray:
        """Return the places among t after which a token is chosen: of each sampled row the last
        new token that is no draft, then its drafts."""
        at = np.array(self.sampled, dtype=np.int64)
        at[at >= self.decode_rows] += self.padding
        ends = self.query_bounds[at + 1]
        if not any(self.drafts):
            return ends - 1
        pairs = zip(self.sampled, ends, strict=True)
        return np.concatenate([np.arange(end - 1 - len(self.drafts[n]), end) for n, end in pairs])

    def moved_on(self, **changes: Any) -> BatchPlan:
        """Return a plan of the same rows with other numbers; `dataclasses.replace`, but quicker,
        and what was worked out of the rows stays."""
        found = object.__new__(BatchPlan)
        vars(found).update(vars(self) | changes)
        return found

    def digest(self) -> bytes:
        """Return a digest of what the step computes: the same on ranks that plan the same."""
        found = hashlib.sha256(repr((self.sampled_slots, self.state_copies)).encode())
        for array in (
            self.tokens,
            self.positions,
            self.query_bounds,
            self.context_lengths,
            self.block_table,
            self.slot_mapping,
            self.state_slots,
        ):
            found.update(array.tobytes())
        return found.digest()


class SharedStep(NamedTuple):
    """What ranks of several replicas that share experts agree on before a step.

    Args:
        most_tokens: new tokens of the rank that has most.
        eager: some rank's step is none for a graph.
    """

    most_tokens: int
    eager: bool


@dataclass
class CacheStats:
    """What the prefix cache and the scheduler did, in tokens and events since the start.

    Args:
        steps: planned.
        computed: tokens computed.
        queried: tokens of prompts that were looked up in the prefix cache.
        hit: of those, found there.
        waits: how often a request waited for blocks that another was computing.
        preempted: how often a row gave up its blocks.
        snapshots: copies of states that were made.
        restored: rows that went on from such a copy.
        wasted: tokens that were chosen for outputs that had ended meanwhile.
        overlapped: steps whose plan was ready before the step before had ended.
        sampled: rows that got new tokens, summed over steps.
        drafted: drafts that were verified, without those that a grammar forces.
        accepted: of those, accepted.
        forced: tokens that a grammar forced and that took no step of their own.
    """

    steps: int = 0
    computed: int = 0
    queried: int = 0
    hit: int = 0
    waits: int = 0
    preempted: int = 0
    snapshots: int = 0
    restored: int = 0
    wasted: int = 0
    overlapped: int = 0
    sampled: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """New tokens of a row by the steps in which it got any; 1 without drafts."""
        found = self.sampled + self.accepted + self.forced
        return found / self.sampled if self.sampled else 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        """Return the sums of two engines."""
        return CacheStats(**{name: count + vars(other)[name] for name, count in vars(self).items()})


class Scheduler:
    """Plan the steps of an engine.

    Args:
        num_blocks, block_size: of the cache.
        max_rows: rows that run at a time.
        max_step_tokens: new tokens of a step; with fewer than rows the youngest rows wait.
        prefix_caching: reuse blocks of rows that began alike.
        states: the slots of recurrent mixers; None for a model without any.
        window: tokens that the attention layer sees that sees most; None if one sees all.
        token_multiple: what the tokens of a step are padded to a multiple of.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_step_tokens: int,
        prefix_caching: bool = True,
        states: StateCache | None = None,
        window: int | None = None,
        token_multiple: int = 1,
    ) -> None:
        if max_rows < 1 or max_step_tokens < 1:
            raise ValueError(
                f"{max_rows} rows and {max_step_tokens} tokens a step: use at least one of each"
            )
        self.block_size, self.max_rows, self.max_step_tokens = block_size, max_rows, max_step_tokens
        self.prefix_caching, self.window = prefix_caching, window
        self.token_multiple = token_multiple
        self.pool = BlockPool(num_blocks)
        self.stats = CacheStats()
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []  # by priority, of each the oldest first
        self._states = states
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # digest -> slot, oldest first
        self._state_copies: list[tuple[int | None, int]] = []  # before the next step
        self._computing: dict[bytes, Row] = {}  # blocks of prompts, by whom they will be computed
        self._slots = list(range(max_rows - 1, -1, -1))
        self._table = np.zeros((max_rows, 0), dtype=np.int32)
        # The last step, if all that ran had one new token in it and nothing has ended since.
        self._steady: BatchPlan | None = None

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a row of so many tokens takes."""
        return -(-tokens // self.block_size)

    def check(self, max_tokens: int) -> None:
        """Raise RequestError for a row of so many tokens that does not fit the cache even alone."""
        # The last token is chosen and never computed.
        wanted = self.blocks_for(max_tokens - 1)
        if wanted > self.pool.num_blocks:
            raise RequestError(
                f"{max_tokens} tokens take {wanted} blocks of {self.block_size} tokens, the "
                f"cache has {self.pool.num_blocks}: make it {wanted} or ask for fewer tokens",
                field="max_new_tokens",
            )

    def add(self, row: Row) -> None:
        """Take a row in, which fits the cache (see `check`)."""
        insort_right(self.waiting, row, key=lambda other: other.priority)

    def remove(self, row: Row) -> None:
        """Let go of a row and of all that it has: it has ended, or is not wanted any more."""
        if row.slot >= 0:
            self.running.remove(row)
            self._let_go(row)
        elif row in self.waiting:
            self.waiting.remove(row)

    def preempt_all(self) -> None:
        """Make all running rows wait to be computed again."""
        for row in reversed(self.running.copy()):
            self._preempt(row)

    def forget_cached(self) -> None:
        """Give up what the prefix cache holds, and share nothing that rows which run now compute:
        the weights have changed. A row that is computed again from its first token is shared."""
        for row in self.running:
            row.shares, row.borders = False, set()
            if self._states is not None:
                self._states.release(row._reserved.values())
                row._reserved = {}
        self._computing.clear()
        self.pool.forget_all()
        if self._states is not None:
            self._states.release(self._snapshots.values())
        self._snapshots.clear()

    # --- planning ---------------------------------------------------------------------------------

    def schedule(self, propose: Propose | None = None, *, stages: int = 1) -> BatchPlan | None:
        """Plan a step; None if no row can be served: there is none, or all wait for steps in
        flight.

        Args:
            propose: returns drafts; None speculates on none.
            stages: of a pipeline. With several, as many steps are in flight: each has its share of
                the rows at most, and no row whose next token another one chooses.
        """
        moved = self._moved_on() if propose is None and stages == 1 else None
        if moved is not None:
            return moved
        budget = self.max_step_tokens
        most = -(-min(len(self.running) + len(self.waiting), self.max_rows) // stages)
        planned: list[tuple[Row, int]] = []
        for row in self.running.copy():
            if len(planned) == most:
                break
            if row.slot < 0 or row.waits:  # -1: preempted for an older one
                continue
            if stages > 1 and row.pending:
                continue
            count = self._within_borders(row, min(row.remaining, budget))
            if count and self._grow(row, row.planned + count):
                planned.append((row, count))
                budget -= count
        for row in list(self.waiting):
            if len(planned) == most or len(self.running) == self.max_rows or not budget:
                break
            admitted = self._admit(row, budget)
            if admitted is None:
                break
            if admitted:
                planned.append((row, admitted))
                budget -= admitted
        if not planned:
            return None
        if propose is not None or any(row.forced for row, _ in planned):
            self._add_drafts(planned, budget, propose)
        planned.sort(key=lambda one: one[1] > 1)  # stable: single tokens first
        plan = self._plan(planned)
        is_steady = plan.decode_rows == len(plan.sampled) == len(self.running)
        self._steady = plan if is_steady and not any(plan.drafts) else None
        return plan

    def _moved_on(self) -> BatchPlan | None:
        """Plan a step that is the last one moved on by a place; None if another is wanted: rows may
        be admitted, have ended, wait for a step in flight, or give up their blocks now."""
        last = self._steady
        if last is None or (self.waiting and len(self.running) < self.max_rows):
            return None
        rows, size, count = last.rows, self.block_size, len(last.rows)
        if any(row.pending or row.forced for row in rows):
            return None
        moved = np.array((last.positions, last.context_lengths, last.slot_mapping))
        moved[:, :count] += 1  # padding, which follows, stays where it is
        positions, contexts, slots = moved
        starts = tuple(start + 1 for start in last.starts)
        entered = [n for n, start in enumerate(starts) if start % size == 0]
        for n in entered:
            self._grow(rows[n], starts[n] + 1)
            if self._steady is None:  # a row has given up its blocks
                return None
        table = last.block_table
        if entered:
            table = np.zeros((len(table), self.blocks_for(max(starts) + 1)), dtype=np.int32)
            table[:count] = self._table[list(last.sampled_slots), : table.shape[1]]
            slots[entered] = table[entered, positions[entered] // size] * size
        tokens = np.zeros_like(last.tokens)
        tokens[:count] = [row.tokens[-1] for row in rows]
        copies, self._state_copies = tuple(self._state_copies), []
        for row in rows:
            row.in_flight += 1
            row.pending += 1
        if self._states is not None:
            for n, start in enumerate(starts):
                if start % size == size - 1:
                    self._reserve_snapshot(rows[n], start)
        self.stats.steps += 1
        self.stats.computed += count
        self.stats.sampled += count
        self._steady = last.moved_on(
            starts=starts,
            tokens=tokens,
            positions=positions,
            context_lengths=contexts,
            block_table=table,
            slot_mapping=slots,
            state_copies=copies,
        )
        return self._steady

    def commit(self, plan: BatchPlan, accepted: Mapping[Row, int] | None = None) -> None:
        """Take note that the oldest step in flight has been computed; before the tokens that it
        chose are appended. A row that was preempted meanwhile has lost what it computed.

        Args:
            accepted: how many drafts of a row were; these are appended here.
        """
        accepted = accepted or {}
        for row, drafts in zip(plan.rows, plan.drafts, strict=True):
            if drafts:  # a row that was preempted keeps its accepted ones too
                row.tokens += drafts[: accepted.get(row, 0)]
                row.drafts = ()
                if row.forced:
                    self.stats.forced += accepted.get(row, 0)
                else:
                    self.stats.drafted += len(drafts)
                    self.stats.accepted += accepted.get(row, 0)
        for n, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            if row.slot < 0 or row.admission != plan.admissions[n]:
                continue
            before, row.computed = row.computed, row.computed + count
            row.in_flight -= count
            if plan.drafts[n]:
                self._undo_rejected(row, before, len(plan.drafts[n]) - accepted.get(row, 0))
            if row.shares and row.computed // self.block_size > before // self.block_size:
                self._publish(row, before)
            if self.window is not None:
                self._free_unseen(row)
        for n in plan.sampled:
            row = plan.rows[n]
            if row.draft_length.most and not row.forced:
                row.draft_length.update(len(plan.drafts[n]), accepted.get(row, 0))

    def _plan(self, planned: Sequence[tuple[Row, int]]) -> BatchPlan:
        rows = tuple(row for row, _ in planned)
        counts = tuple(count for _, count in planned)
        decode_rows = sum(count == 1 for count in counts)
        new = sum(counts)
        padding = -new % self.token_multiple
        sizes = np.ones(len(rows) + padding, dtype=np.int32)
        at = np.arange(len(rows))  # where each row is: padding follows those of one token
        at[decode_rows:] += padding
        sizes[at] = counts
        bounds = np.zeros(len(sizes) + 1, dtype=np.int32)
        np.cumsum(sizes, out=bounds[1:])
        starts, contexts = np.zeros_like(sizes), np.zeros_like(sizes)
        firsts = [row.planned for row in rows]
        starts[at] = firsts
        contexts[at] = starts[at] + sizes[at]
        table = np.zeros((len(sizes), self.blocks_for(int(contexts.max()))), dtype=np.int32)
        table[at] = self._table[[row.slot for row in rows], : table.shape[1]]
        states = np.full(len(sizes), -1, dtype=np.int32)
        states[at] = [row.state_slot for row in rows]
        numbers = np.repeat(np.arange(len(sizes)), sizes)  # the row of each token
        positions = np.arange(bounds[-1], dtype=np.int32) + (starts - bounds[:-1])[numbers]
        pages = table[numbers, positions // self.block_size]
        slots = pages * self.block_size + positions % self.block_size
        slots[decode_rows : decode_rows + padding] = -1
        known: list[int] = []
        for (row, count), first in zip(planned, firsts, strict=True):
            known += row.tokens[first : first + count] if not row.pending else [-1 - row.slot]
            known += row.drafts
        tokens = np.zeros_like(positions)
        tokens[:decode_rows] = known[:decode_rows]
        tokens[decode_rows + padding :] = known[decode_rows:]
        copies, self._state_copies = tuple(self._state_copies), []
        sampled = self._note_planned(planned)
        return BatchPlan(
            rows=rows,
            counts=counts,
            drafts=tuple(row.drafts for row in rows),
            starts=tuple(firsts),
            admissions=tuple(row.admission for row in rows),
            decode_rows=decode_rows,
            padding=padding,
            tokens=tokens,
            positions=positions,
            query_bounds=bounds,
            context_lengths=contexts,
            block_table=table,
            slot_mapping=slots,
            state_slots=states,
            state_copies=copies,
            sampled=sampled,
            sampled_slots=tuple(rows[n].slot for n in sampled),
        )

    def _grow(self, row: Row, tokens: int) -> bool:
        """Give a running row blocks for so many tokens; False if it had to give up its own."""
        missing = self.blocks_for(tokens) - len(row.blocks)
        while missing > 0:
            found = self.pool.allocate(missing)
            if found is not None:
                self._set_blocks(row, found)
                return True
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is row:
                return False
        return True

    def _note_planned(self, planned: Sequence[tuple[Row, int]]) -> tuple[int, ...]:
        """Take note of the tokens of a step that begins; return which rows get new ones."""
        sampled = tuple(
            n for n, (row, count) in enumerate(planned) if row.remaining + len(row.drafts) == count
        )
        self.stats.steps += 1
        self.stats.computed += sum(count for _, count in planned)
        self.stats.sampled += len(sampled)
        for row, count in planned:
            before, row.in_flight = row.planned, row.in_flight + count
            if not row.drafts:  # else it is not known where the step ends
                self._reserve_snapshot(row, before)
        for n in sampled:
            planned[n][0].pending += 1
        return sampled

    def _add_drafts(
        self, planned: list[tuple[Row, int]], budget: int, propose: Propose | None
    ) -> None:
        """Give planned rows that get a new token drafts, as far as tokens and blocks are left."""
        asked: list[tuple[int, int]] = []
        for n, (row, count) in enumerate(planned):
            room = self._draft_room(row, count, budget)
            if room > 0:
                asked.append((n, room))
                budget -= room
                grown = self.pool.allocate(
                    self.blocks_for(row.planned + count + room) - len(row.blocks)
                )
                assert grown is not None
                self._set_blocks(row, grown)
        free = [(planned[n][0], room) for n, room in asked if not planned[n][0].forced]
        proposed = iter(propose(free) if propose is not None and free else ())
        for n, room in asked:
            row, count = planned[n]
            drafts = row.forced[:room] or next(proposed)
            row.drafts = tuple(drafts) if drafts and self._save_states(row) else ()
            planned[n] = row, count + len(row.drafts)
            self._trim(row, planned[n][1] + row.planned)

    def _draft_room(self, row: Row, count: int, budget: int) -> int:
        """Return how many drafts a planned row may have."""
        if count != row.remaining:
            return 0
        computed = row.planned + count
        # The last token is chosen and never computed.
        ends = len(row.tokens) + row.pending
        most = len(row.forced) or row.draft_length.most
        room = min(len(row.forced) or row.draft_length.next, budget, row.max_tokens - ends - 1)
        places = (len(row.blocks) + self.pool.available) * self.block_size
        room = min(room, places - computed)
        if self._states is not None:
            # Accepted tokens that are computed again take the place of drafts; and states are
            # copied for the prefix cache where a step ends with a block.
            room = min(room, most + 1 - count)
            if row.shares:
                room = min(room, -computed % self.block_size)
        return room

    def _save_states(self, row: Row) -> bool:
        """Copy the states of a row, if it has any, to a slot of its own, before drafts change them;
        False if no slot is free."""
        if self._states is None:
            return True
        if not self._has_slot(keep=None):
            return False
        (row.saved_slot,) = self._states.take(1)
        self._state_copies.append((row.state_slot, row.saved_slot))
        return True

    def _undo_rejected(self, row: Row, before: int, rejected: int) -> None:
        """Go back to where the rejected drafts of a row began, which had `before` tokens in the
        cache before the step."""
        row.computed -= rejected
        if self._states is not None:
            if rejected:  # the states have seen all drafts
                row.computed = before
                row.state_slot, row.saved_slot = row.saved_slot, row.state_slot
            self._states.release([row.saved_slot])
            row.saved_slot = -1
            self._reserve_snapshot(row, before)
        self._trim(row, row.computed)

    def _trim(self, row: Row, tokens: int) -> None:
        """Give back the blocks of a row that so many tokens do not take."""
        keep = self.blocks_for(tokens)
        self.pool.release(row.blocks[keep:])
        del row.blocks[keep:]

    def _set_blocks(self, row: Row, found: Sequence[int]) -> None:
        """Append blocks to those of a running row."""
        first = len(row.blocks)
        row.blocks += found
        if len(row.blocks) > self._table.shape[1]:
            width = max(2 * self._table.shape[1], len(row.blocks), 8)
            grown = np.zeros((self.max_rows, width), dtype=np.int32)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown
        self._table[row.slot, first : len(row.blocks)] = found

    def _preempt(self, row: Row) -> None:
        """Take a running row's blocks; it waits before all others of its priority, to be computed
        again."""
        self.stats.preempted += 1
        self.running.remove(row)
        self._let_go(row)
        insort_left(self.waiting, row, key=lambda other: other.priority)

    def _let_go(self, row: Row) -> None:
        """Take blocks and slots of a row that does not run any more."""
        self._steady = None
        held = [block for block in row.blocks if block >= 0]
        self.pool.release(held)
        row.blocks = []
        row.computed = row.in_flight = 0
        self._slots.append(row.slot)
        row.slot = -1
        if self._states is not None and row.state_slot >= 0:
            saved = [row.saved_slot] * (row.saved_slot >= 0)
            self._states.release([row.state_slot, *saved, *row._reserved.values()])
        row.state_slot, row.saved_slot, row.borders, row._reserved = -1, -1, set(), {}
        for digest in row.digests:
            if self._computing.get(digest) is row:
                del self._computing[digest]

    # --- admission and the prefix cache -----------------------------------------------------------

    def _admit(self, row: Row, budget: int) -> int | None:
        """Let a waiting row run; return the tokens that it computes in this step, 0 if it has to
        wait for blocks of another, None if there is no room or not all of its tokens are there."""
        if row.pending:
            return None
        found: list[int] = []
        snapshot: bytes | None = None
        parted = 0
        if self.prefix_caching:
            row.digests = block_digests(row.tokens, self.block_size, known=row.digests)
        if self.prefix_caching and not row.needs_prompt_logits:
            # The newest token is always computed: its logits are wanted.
            most = (len(row.tokens) - 1) // self.block_size
            for digest in row.digests[:most]:
                block = self.pool.find(digest)
                if block is None:
                    break
                found.append(block)
            if len(found) < most and (other := self._computing.get(row.digests[len(found)])):
                self._part(other, row)
                self.stats.waits += 1
                return 0
            parted = len(found)
            if self._states is not None:
                while found and row.digests[len(found) - 1] not in self._snapshots:
                    found.pop()
                snapshot = row.digests[len(found) - 1] if found else None
        self.pool.share(found)
        # Room for all that is known of it, lest it be preempted at once.
        missing = self.blocks_for(len(row.tokens)) - len(found)
        fits = missing <= self.pool.available or not self.running
        # Of states, steps in flight may hold the last slot for a snapshot.
        if not fits or (self._states is not None and not self._has_slot(keep=snapshot)):
            self.pool.release(found)
            return None
        self.waiting.remove(row)
        insort_right(self.running, row, key=lambda other: other.priority)
        row.shares = self.prefix_caching
        row.admission += 1
        row.slot = self._slots.pop()
        row.computed = len(found) * self.block_size
        self._set_blocks(row, found)
        if self._states is not None:
            self._begin_states(row, snapshot, parted)
        self._count_lookup(row)
        if self.prefix_caching:
            for digest in row.digests[len(found) :]:
                self._computing.setdefault(digest, row)
        count = self._within_borders(row, min(row.remaining, budget))
        grown = self.pool.allocate(self.blocks_for(row.computed + count) - len(row.blocks))
        assert grown is not None
        self._set_blocks(row, grown)
        return count

    def _count_lookup(self, row: Row) -> None:
        """Count what the prefix cache had of a row's prompt when it first ran."""
        if row.cached is None:
            row.cached = min(row.computed, row.prompt_length)
            if self.prefix_caching and not row.needs_prompt_logits:
                self.stats.queried += row.prompt_length
                self.stats.hit += row.cached

    def _begin_states(self, row: Row, snapshot: bytes | None, parted: int) -> None:
        """Give a row a slot for its states, with those of a snapshot if there is one."""
        assert self._states is not None
        (row.state_slot,) = self._states.take(1)
        if snapshot is None:
            self._state_copies.append((None, row.state_slot))
        else:
            self._snapshots.move_to_end(snapshot)
            self._state_copies.append((self._snapshots[snapshot], row.state_slot))
            self.stats.restored += 1
        if not self.prefix_caching:
            return
        # Where it parts from what is known, its last block, and evenly between.
        size, length = self.block_size, len(row.tokens) - 1
        step = size * max(1, -(-length // (SNAPSHOTS_PER_PROMPT * size)))
        borders = {parted * size, length // size * size, *range(step, length, step)}
        row.borders = {border for border in borders if border > row.computed}

    def _part(self, other: Row, row: Row) -> None:
        """Have states copied where a waiting row will part from the one it waits for."""
        if self._states is None:
            return
        common = 0
        for mine, its in zip(row.digests, other.digests, strict=False):
            if mine != its:
                break
            common += 1
        common = min(common, (len(row.tokens) - 1) // self.block_size)
        if common * self.block_size > other.planned:
            other.borders.add(common * self.block_size)

    def _within_borders(self, row: Row, count: int) -> int:
        """Return how many of `count` tokens come before the next border of a row."""
        ahead = [border - row.planned for border in row.borders if border > row.planned]
        return min([count, *ahead])

    def _publish(self, row: Row, before: int) -> None:
        """Let others find the blocks that a row has filled since it had `before` tokens in the
        cache, at least one."""
        size = self.block_size
        first, last = before // size, row.computed // size
        row.digests = block_digests(row.tokens[: last * size], size, known=row.digests)
        for block in range(first, last):
            digest = row.digests[block]
            if row.blocks[block] >= 0:
                self.pool.publish(row.blocks[block], digest)
            if self._computing.get(digest) is row:
                del self._computing[digest]
        slot = row._reserved.pop(row.computed, None)
        if slot is not None:
            self._keep_snapshot(row, slot, row.digests[last - 1])

    def _reserve_snapshot(self, row: Row, before: int) -> None:
        """Have a row's states copied after a step that it begins with `before` tokens, if that ends
        at a border; `_keep_snapshot` follows when all tokens are known."""
        size, end = self.block_size, row.planned
        if self._states is None or not row.shares or end % size or end == before:
            return
        generated = end > row.prompt_length
        if not generated and end not in row.borders:
            return
        known = row.digests[end // size - 1] if len(row.digests) >= end // size else None
        if known in self._snapshots:
            self._snapshots.move_to_end(known)
            return
        # Of what a row generates only the latest border is kept.
        old, row._latest_snapshot = row._latest_snapshot, None
        if generated and old is not None and old in self._snapshots:
            slot = self._snapshots.pop(old)
        else:
            if not self._has_slot(keep=None):
                return
            (slot,) = self._states.take(1)
        self._state_copies.append((row.state_slot, slot))
        row._reserved[end] = slot

    def _keep_snapshot(self, row: Row, slot: int, digest: bytes) -> None:
        """Let others find the copy of a row's states in a slot."""
        assert self._states is not None
        if row.computed > row.prompt_length:
            row._latest_snapshot = digest
        if digest in self._snapshots:
            self._states.release([slot])
            self._snapshots.move_to_end(digest)
            return
        self._snapshots[digest] = slot
        self.stats.snapshots += 1

    def _has_slot(self, *, keep: bytes | None) -> bool:
        """Return whether a slot of the states is free; where none is, the snapshot but `keep` that
        was not used for longest makes room."""
        assert self._states is not None
        if not self._states.free_slots:
            for digest in self._snapshots:
                if digest != keep:
                    self._states.release([self._snapshots.pop(digest)])
                    break
        return self._states.free_slots > 0

    def _free_unseen(self, row: Row) -> None:
        """Release the blocks that no window sees any more."""
        assert self.window is not None
        first = max(0, row.computed + 1 - self.window) // self.block_size
        gone = [n for n in range(min(first, len(row.blocks))) if row.blocks[n] >= 0]
        if gone:
            self.pool.release([row.blocks[n] for n in gone])
            for n in gone:
                row.blocks[n] = -1
