# SPDX-License-Identifier: Apache-2.0
"""`KVCacheManager`: blocks, prefixes, rows and state slots of the running sequences.

The manager is host bookkeeping: it assigns memory of the `PagedCache` and touches no tensor.
Attention layers with and without a window have block tables of their own, because layers with a
window need few blocks per sequence (`block_pool.BlockGroup`). A prefix is cached only if all groups
have its blocks.

Recurrent mixers also need their states at the end of a shared prefix, so the states are copied to
separate slots (snapshots) at several block boundaries: evenly spaced over the prompt, at the last
full block of the prompt, where a waiting prompt diverges from the prompt being computed, and at the
latest full block of the output. The least recently used snapshot is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megatron.core.inference.block_pool import BlockGroup, BlockPool, hash_blocks
from megatron.core.inference.cache import StateCache
from megatron.core.inference.request_state import (
    SchedulerStats,
    SequenceState,
    StateCopies,
)
from megatron.core.inference.requests import RequestError

#: Upper bound of the evenly spaced state snapshots per prompt.
SNAPSHOTS_PER_PROMPT = 10


class CachedPrefix(NamedTuple):
    """The prefix of a waiting sequence that is in the prefix cache.

    Args:
        length: number of blocks that the sequence can use; with recurrent mixers up to the latest
            snapshot.
        blocks: per group of layers the blocks; -1 for a block behind the window.
        snapshot: block hash of the snapshot at the end of `blocks`; None without recurrent mixers.
        num_blocks: all cached blocks of the prefix, with or without a snapshot.
    """

    length: int
    blocks: list[list[int]]
    snapshot: bytes | None
    num_blocks: int


class KVCacheManager:
    """Assign blocks, rows of the block table, and slots of recurrent states to sequences.

    Args:
        groups: the groups of attention layers; the group without a window comes first.
        block_size: tokens per block.
        max_num_seqs: number of rows of the block tables.
        prefix_caching: share full blocks among sequences with a common prefix.
        states: slots of the recurrent mixers; None for a model without recurrent mixers.
        stats: counters to update.

    Attributes:
        groups: the groups of attention layers.
        has_states: True for a model with recurrent mixers.
        has_windows: True if blocks leave an attention window.
        block_tables: int32 [groups, max_num_seqs, w], blocks by group and row. The width grows with
            the longest sequence. Rows keep stale entries after a sequence has left, which
            `context_lengths` hides.
    """

    def __init__(
        self,
        *,
        groups: Sequence[BlockGroup],
        block_size: int,
        max_num_seqs: int,
        prefix_caching: bool,
        states: StateCache | None,
        stats: SchedulerStats,
    ) -> None:
        self.groups, self._pools = tuple(groups), [group.pool for group in groups]
        self.block_size, self.prefix_caching = block_size, prefix_caching
        self.has_windows = any(group.window is not None for group in groups)
        self.has_states = states is not None
        self._states, self._stats = states, stats
        self.block_tables = np.zeros((len(self.groups), max_num_seqs, 0), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Block hash -> state slot. The order is LRU: the first entry is evicted first.
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        # Copies run before the next step, on its stream, so they see the states that the steps in
        # flight leave. A slot may be a source and then a target, so the order matters.
        self._state_copies: list[tuple[int | None, int]] = []
        # Block hash -> running sequence that will compute the block. Prompts only.
        self._block_owners: dict[bytes, SequenceState] = {}

    @property
    def pool(self) -> BlockPool:
        """The blocks of the first group, which bound the length of sequences."""
        return self._pools[0]

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def check(self, length: int) -> None:
        """Raise RequestError if a sequence of `length` tokens exceeds the empty cache."""
        # The last token is sampled but never computed, so it needs no cache slot.
        num_blocks = self.blocks_for(length - 1)
        if num_blocks > self.pool.num_blocks:
            raise RequestError(
                f"{length} tokens take {num_blocks} blocks of {self.block_size} tokens, but "
                f"the cache has {self.pool.num_blocks}: enlarge it to {num_blocks} or request "
                "fewer tokens",
                field="max_new_tokens",
            )

    def take_state_copies(self) -> StateCopies:
        """Return the copies of states before the next step; they are returned once."""
        copies, self._state_copies = tuple(self._state_copies), []
        return copies

    def reset_prefix_cache(self, running: Iterable[SequenceState]) -> None:
        """Empty the prefix cache after the weights have changed.

        Blocks of running sequences are not cached any more, because they mix old and new weights. A
        sequence that is preempted and recomputed from its first token is cacheable again.
        """
        for seq in running:
            seq.cacheable, seq.snapshot_positions = False, set()
            if self._states is not None:
                self._states.release(seq.reserved_snapshots.values())
                seq.reserved_snapshots = {}
        self._block_owners.clear()
        for pool in self._pools:
            pool.forget_all()
        if self._states is not None:
            self._states.release(self._snapshots.values())
        self._snapshots.clear()

    # --- sequences --------------------------------------------------------------------------------

    def find_prefix(self, seq: SequenceState) -> CachedPrefix | None:
        """Return the cached prefix of a waiting sequence; None if the sequence should wait, because
        another sequence is about to compute its next block."""
        nothing = CachedPrefix(0, [[] for _ in self.groups], None, 0)
        if not self.prefix_caching:
            return nothing
        seq.block_hashes = hash_blocks(
            seq.tokens, self.block_size, prefix_hashes=seq.block_hashes, salt=seq.cache_salt
        )
        # Cached tokens have no logits, so such a prompt is computed completely.
        if seq.needs_prompt_logits:
            return nothing
        # The newest token is always computed: its logits are sampled.
        max_cached = (len(seq.tokens) - 1) // self.block_size
        num_blocks = self._longest_prefix(seq.block_hashes, max_cached)
        if num_blocks < max_cached and (
            owner := self._block_owners.get(seq.block_hashes[num_blocks])
        ):
            self._snapshot_divergence(owner, seq)
            return None
        length, snapshot = num_blocks, None
        # Keys and values alone do not suffice: use the prefix up to the latest snapshot.
        while self._states is not None and length:
            snapshot = seq.block_hashes[length - 1]
            if snapshot in self._snapshots:
                break
            length, snapshot = self._longest_prefix(seq.block_hashes, length - 1), None
        blocks = [group.cached_blocks(seq.block_hashes, length) for group in self.groups]
        return CachedPrefix(length, blocks, snapshot, num_blocks)

    def _longest_prefix(self, block_hashes: Sequence[bytes], length: int) -> int:
        """Return the longest cached prefix of at most `length` blocks."""
        for group in self.groups:  # a prefix of any length fits the group without a window
            length = group.longest_prefix(block_hashes, length)
        return length

    def admit(self, seq: SequenceState, prefix: CachedPrefix, *, is_alone: bool) -> bool:
        """Assign a row, the blocks of the prefix and a state slot to a sequence that starts to run.

        Args:
            seq: the sequence.
            prefix: return value of `find_prefix`.
            is_alone: no sequence is running, so the sequence is admitted with less memory.

        Returns:
            False if there is no room; nothing has changed then.
        """
        # Take the references first: counting or evicting below must not free these blocks.
        for pool, blocks in zip(self._pools, prefix.blocks, strict=True):
            pool.share([block for block in blocks if block >= 0])
        # Require blocks for all tokens of the sequence, or it would be preempted at once.
        missing = self.blocks_for(len(seq.tokens)) - prefix.length
        fits = is_alone or all(
            group.num_missing(missing) <= group.pool.available for group in self.groups
        )
        # Steps in flight may have reserved the last free state slot for a snapshot.
        if not fits or (
            self._states is not None and not self._ensure_state_slot(keep=prefix.snapshot)
        ):
            for pool, blocks in zip(self._pools, prefix.blocks, strict=True):
                pool.release([block for block in blocks if block >= 0])
            return False
        seq.cacheable = self.prefix_caching
        seq.row = self._free_rows.pop()
        seq.num_computed_tokens = prefix.length * self.block_size
        seq.block_ids = [[] for _ in self.groups]
        self._append_blocks(seq, prefix.blocks)
        if self._states is not None:
            self._init_states(seq, prefix)
        if self.prefix_caching:
            # From now on, others with the same prefix wait for these blocks.
            for block_hash in seq.block_hashes[prefix.length :]:
                self._block_owners.setdefault(block_hash, seq)
        return True

    def allocate(self, seq: SequenceState, num_tokens: int) -> bool:
        """Allocate blocks so that a running sequence holds `num_tokens` tokens; False if too few
        blocks are free, and nothing has changed then."""
        missing = self.blocks_for(num_tokens) - len(seq.block_ids[0])
        if missing > 0:
            # Check all groups first: either all allocate, or none does.
            if any(missing > pool.available for pool in self._pools):
                return False
            self._append_blocks(seq, [pool.allocate(missing) or [] for pool in self._pools])
        return True

    def num_free_tokens(self, seq: SequenceState) -> int:
        """Return how many tokens the blocks of a sequence and the free blocks can hold."""
        available = min(pool.available for pool in self._pools)
        return (len(seq.block_ids[0]) + available) * self.block_size

    def free_after(self, seq: SequenceState, num_tokens: int) -> None:
        """Free the blocks of a sequence beyond `num_tokens` tokens."""
        num_blocks = self.blocks_for(num_tokens)
        for pool, block_ids in zip(self._pools, seq.block_ids, strict=True):
            pool.release(block_ids[num_blocks:])
            del block_ids[num_blocks:]

    def free(self, seq: SequenceState) -> None:
        """Free the row, the blocks and the slots of a sequence that stops running."""
        # Steps in flight may still write to the blocks. A step that reuses a block runs after them,
        # so its writes win.
        for pool, block_ids in zip(self._pools, seq.block_ids, strict=True):
            pool.release([block for block in block_ids if block >= 0])
        seq.block_ids = []
        seq.num_computed_tokens = seq.num_in_flight_tokens = 0
        self._free_rows.append(seq.row)
        seq.row = -1
        if self._states is not None and seq.state_slot >= 0:
            saved_slots = [seq.saved_state_slot] * (seq.saved_state_slot >= 0)
            self._states.release([seq.state_slot, *saved_slots, *seq.reserved_snapshots.values()])
        seq.state_slot = seq.saved_state_slot = -1
        seq.snapshot_positions, seq.reserved_snapshots = set(), {}
        # No waiting sequence may wait for a block that this sequence no longer computes.
        for block_hash in seq.block_hashes:
            if self._block_owners.get(block_hash) is seq:
                del self._block_owners[block_hash]

    def _append_blocks(self, seq: SequenceState, new_blocks: Sequence[list[int]]) -> None:
        """Append blocks of each group to a running sequence and to its row of the block tables."""
        start = len(seq.block_ids[0])
        for block_ids, group_blocks in zip(seq.block_ids, new_blocks, strict=True):
            block_ids += group_blocks
        end, tables = len(seq.block_ids[0]), self.block_tables
        # Doubling makes the cost of all copies linear in the longest sequence.
        if end > tables.shape[2]:
            width = max(2 * tables.shape[2], end, 8)
            self.block_tables = np.zeros((*tables.shape[:2], width), dtype=np.int32)
            self.block_tables[:, :, : tables.shape[2]] = tables
        self.block_tables[:, seq.row, start:end] = new_blocks

    # --- finished steps ---------------------------------------------------------------------------

    def cache_full_blocks(self, seq: SequenceState, num_before: int) -> None:
        """Add the blocks that a step has filled to the prefix cache.

        Args:
            num_before: computed tokens before the step, which has filled at least one block.
        """
        size = self.block_size
        start, end = num_before // size, seq.num_computed_tokens // size
        seq.block_hashes = hash_blocks(
            seq.tokens[: end * size],
            size,
            prefix_hashes=seq.block_hashes,
            salt=seq.cache_salt,
        )
        for block in range(start, end):
            block_hash = seq.block_hashes[block]
            for pool, block_ids in zip(self._pools, seq.block_ids, strict=True):
                # -1: the block has left the window and was released before it was cached.
                if block_ids[block] >= 0:
                    pool.publish(block_ids[block], block_hash)
            if self._block_owners.get(block_hash) is seq:
                del self._block_owners[block_hash]
        slot = seq.reserved_snapshots.pop(seq.num_computed_tokens, None)
        # The step that has ended here copied the states; now the hash of the block is known.
        if slot is not None:
            self._cache_snapshot(seq, slot, seq.block_hashes[end - 1])

    def free_out_of_window(self, seq: SequenceState) -> None:
        """Release the blocks behind the largest attention window of each group."""
        for group, block_ids in zip(self.groups, seq.block_ids, strict=True):
            # Blocks leave the window in order, so the blocks before `start` are released already.
            end = min(group.num_unseen(seq.num_computed_tokens), len(block_ids))
            start = end
            while start and block_ids[start - 1] >= 0:
                start -= 1
            if start < end:
                group.pool.release(block_ids[start:end])
                block_ids[start:end] = [-1] * (end - start)

    # --- recurrent states -------------------------------------------------------------------------

    def save_states(self, seq: SequenceState) -> bool:
        """Save the recurrent states before drafts change them; False if no slot is free."""
        if self._states is None:
            return True
        if not self._ensure_state_slot(keep=None):
            return False
        (seq.saved_state_slot,) = self._states.take(1)
        self._state_copies.append((seq.state_slot, seq.saved_state_slot))
        return True

    def roll_back(self, seq: SequenceState, num_before: int, num_rejected: int) -> None:
        """Roll a sequence back to its last accepted draft.

        Args:
            num_before: its computed tokens before the step.
            num_rejected: number of rejected drafts.
        """
        seq.num_computed_tokens -= num_rejected
        if self._states is not None:
            # A recurrent state cannot be truncated: it includes all drafts. Swap the saved state
            # in; the next step recomputes the accepted drafts.
            if num_rejected:
                seq.num_computed_tokens = num_before
                seq.state_slot, seq.saved_state_slot = seq.saved_state_slot, seq.state_slot
            self._states.release([seq.saved_state_slot])
            seq.saved_state_slot = -1
            self.reserve_snapshot(seq, num_before)
        self.free_after(seq, seq.num_computed_tokens)

    def clip_to_snapshot(self, seq: SequenceState, count: int) -> int:
        """Return `count`, reduced so that the step ends at the next snapshot position."""
        distances = [position - seq.num_planned_tokens for position in seq.snapshot_positions]
        return min([count, *(distance for distance in distances if distance > 0)])

    def reserve_snapshot(self, seq: SequenceState, num_before: int) -> None:
        """Copy the states after a step that ends at a snapshot position.

        The copy runs before the next step. `cache_full_blocks` adds it to the prefix cache once all
        tokens of the block are on the host.

        Args:
            num_before: scheduled tokens of the sequence before the step.
        """
        size, end = self.block_size, seq.num_planned_tokens
        if self._states is None or not seq.cacheable or end % size or end == num_before:
            return
        is_output = end > seq.num_prompt_tokens
        if not is_output and end not in seq.snapshot_positions:
            return
        # The hash is missing while the host does not have all tokens of the block.
        has_hash = len(seq.block_hashes) >= end // size
        block_hash = seq.block_hashes[end // size - 1] if has_hash else None
        if block_hash in self._snapshots:
            self._snapshots.move_to_end(block_hash)
            return
        # Only the latest snapshot of the output is kept: overwrite the previous one in its slot.
        previous, seq.latest_snapshot = seq.latest_snapshot, None
        if is_output and previous is not None and previous in self._snapshots:
            slot = self._snapshots.pop(previous)
        else:
            if not self._ensure_state_slot(keep=None):
                return
            (slot,) = self._states.take(1)
        self._state_copies.append((seq.state_slot, slot))
        seq.reserved_snapshots[end] = slot

    def _init_states(self, seq: SequenceState, prefix: CachedPrefix) -> None:
        """Allocate a state slot, initialised from the snapshot of the prefix or with zeros."""
        assert self._states is not None
        (seq.state_slot,) = self._states.take(1)
        if prefix.snapshot is None:
            self._state_copies.append((None, seq.state_slot))
        else:
            self._snapshots.move_to_end(prefix.snapshot)
            self._state_copies.append((self._snapshots[prefix.snapshot], seq.state_slot))
            self._stats.restored += 1
        if not self.prefix_caching:
            return
        # Snapshots where the prompt diverges from the cached prefix, after its last full block, and
        # evenly spaced between them.
        size, length = self.block_size, len(seq.tokens) - 1
        step = size * max(1, -(-length // (SNAPSHOTS_PER_PROMPT * size)))
        positions = {prefix.num_blocks * size, length // size * size, *range(step, length, step)}
        seq.snapshot_positions = {p for p in positions if p > seq.num_computed_tokens}

    def _snapshot_divergence(self, owner: SequenceState, seq: SequenceState) -> None:
        """Add a snapshot position where `seq` diverges from `owner`, whose blocks it waits for."""
        if self._states is None:
            return
        num_common_blocks = 0
        for block_hash, owner_hash in zip(seq.block_hashes, owner.block_hashes, strict=False):
            if block_hash != owner_hash:
                break
            num_common_blocks += 1
        num_common_blocks = min(num_common_blocks, (len(seq.tokens) - 1) // self.block_size)
        if num_common_blocks * self.block_size > owner.num_planned_tokens:
            owner.snapshot_positions.add(num_common_blocks * self.block_size)

    def _cache_snapshot(self, seq: SequenceState, slot: int, block_hash: bytes) -> None:
        """Add a state snapshot to the prefix cache."""
        assert self._states is not None
        if seq.num_computed_tokens > seq.num_prompt_tokens:
            seq.latest_snapshot = block_hash
        if block_hash in self._snapshots:
            self._states.release([slot])
            self._snapshots.move_to_end(block_hash)
            return
        self._snapshots[block_hash] = slot
        self._stats.snapshots += 1

    def _ensure_state_slot(self, *, keep: bytes | None) -> bool:
        """Return whether a state slot is free, after evicting the least recently used snapshot if
        needed. `keep` names a snapshot that must not be evicted."""
        assert self._states is not None
        if not self._states.free_slots:
            for block_hash in self._snapshots:
                if block_hash != keep:
                    self._states.release([self._snapshots.pop(block_hash)])
                    break
        return self._states.free_slots > 0
