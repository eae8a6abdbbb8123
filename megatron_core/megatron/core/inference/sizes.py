# SPDX-License-Identifier: Apache-2.0
"""Engine configuration, and cache sizes that all pipeline stages agree on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.core.inference.stages import StageLink
from megatron.core.transformer import CacheShapes

#: Largest sequence length for block accounting in models without attention, whose tokens take no
#: cache memory.
MAX_SEQUENCE_TOKENS = 1 << 20

#: Neutral element of a minimum over stages, and the window of full attention.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and scheduling options of an engine.

    Args:
        max_num_seqs: largest number of running sequences.
        max_num_batched_tokens: token budget of a step; longer prompts take several steps.
        block_size: tokens per cache block, a power of two, at least 16.
        num_blocks: number of cache blocks; None derives it from `memory_bytes`.
        memory_bytes: bytes of pages and states. The states of `max_num_seqs` sequences come first,
            then state snapshots for the prefix cache with at most a quarter of the remaining bytes,
            then pages.
        prefix_caching: share cache blocks among requests with a common prefix.
        token_multiple: pad the number of tokens of a step to a multiple of this; with sequence
            parallelism the number of ranks.
        asynchronous: schedule a step while the previous step runs. A stop token, `Engine.abort` and
            `Engine.finish` then take effect one step late.
        num_speculative_tokens: largest number of drafts per sequence and step; 0 disables
            speculative decoding.
        max_model_len: longest sequence in tokens; None takes the model's limit.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    prefix_caching: bool = True
    token_multiple: int = 1
    asynchronous: bool = False
    num_speculative_tokens: int = 0
    max_model_len: int | None = None

    def limited_to(self, max_sequence_length: int | None) -> EngineConfig:
        """Return the config with `max_model_len` at most the longest sequence of a model."""
        lengths = [n for n in (self.max_model_len, max_sequence_length) if n is not None]
        return dataclasses.replace(self, max_model_len=min(lengths, default=None))

    @property
    def min_blocks(self) -> int:
        """Smallest number of cache blocks: a step holds all drafts of a sequence and one token."""
        return -(-(1 + self.num_speculative_tokens) // self.block_size)

    @property
    def min_blocks_text(self) -> str:
        """Text for the smallest cache, for error messages."""
        number = "one block" if self.min_blocks == 1 else f"{self.min_blocks} blocks"
        return f"{number} of {self.block_size} tokens"

    def min_state_slots(self, shapes: CacheShapes) -> int:
        """Return the state slots of `max_num_seqs` sequences, without cached snapshots."""
        if not shapes.states:
            return 1
        # Restoring a snapshot needs the snapshot's slot and the slot of the sequence at once.
        slots = self.max_num_seqs + (1 if self.prefix_caching else 0)
        # Speculation saves the states before the drafts in a second slot.
        return slots + (self.max_num_seqs if self.num_speculative_tokens else 0)

    def min_state_bytes(self, shapes: CacheShapes) -> int:
        """Return the bytes of `min_state_slots` slots and of the padding slot."""
        return (self.min_state_slots(shapes) + 1) * shapes.state_bytes

    def sizes(self, shapes: CacheShapes) -> tuple[int, int]:
        """Return the number of blocks and the number of state slots.

        Args:
            shapes: shapes of the model's cache entries.

        Raises:
            ValueError: `memory_bytes` is too small for the states and `min_blocks` blocks.
        """
        block_bytes = shapes.token_bytes * self.block_size
        min_page_bytes = self.min_blocks * block_bytes
        slots = self.min_state_slots(shapes)
        if self.num_blocks is not None:
            snapshots = 2 * self.max_num_seqs if self.prefix_caching and shapes.states else 0
            return self.num_blocks, slots + snapshots
        if self.memory_bytes is None:
            raise ValueError("an engine needs num_blocks or memory_bytes: give one of them")
        # One slot more than can be allocated: padding rows write to it.
        remaining_bytes = self.memory_bytes - (slots + 1) * shapes.state_bytes
        if remaining_bytes < min_page_bytes:
            required_bytes = (slots + 1) * shapes.state_bytes + min_page_bytes
            states = f"the states of {self.max_num_seqs} sequences and " if shapes.states else ""
            raise ValueError(
                f"{self.memory_bytes:,} bytes of memory do not fit "
                f"{states}{self.min_blocks_text}: give at least {required_bytes:,}"
            )
        if shapes.states and self.prefix_caching:
            # Snapshots must leave room for `min_blocks` blocks.
            snapshot_bytes = min(remaining_bytes // 4, remaining_bytes - min_page_bytes)
            snapshots = min(snapshot_bytes // shapes.state_bytes, 16 * self.max_num_seqs)
            slots += snapshots
            remaining_bytes -= snapshots * shapes.state_bytes
        # Without attention a block takes no memory: provide enough for the longest sequences.
        if not block_bytes:
            max_tokens = min(self.max_model_len or MAX_SEQUENCE_TOKENS, MAX_SEQUENCE_TOKENS)
            return self.max_num_seqs * -(-max_tokens // self.block_size), slots
        return remaining_bytes // block_bytes, slots


@dataclass(frozen=True)
class CacheSizes:
    """Cache sizes that hold on all pipeline stages.

    Args:
        num_blocks: pages per attention layer.
        num_slots: number of state slots.
        has_states: True if any layer on any stage has recurrent states.
        window: largest attention window of any layer, in tokens; None with full attention.
    """

    num_blocks: int
    num_slots: int
    has_states: bool
    window: int | None

    @staticmethod
    def for_all_stages(config: EngineConfig, shapes: CacheShapes, link: StageLink) -> CacheSizes:
        """Return the smallest sizes over all stages; all stages call this.

        Schedulers of different stages must assign the same blocks and slots.

        Raises:
            ValueError: the memory of a stage is too small.
        """
        blocks, slots, problem = 0, 0, None
        try:
            blocks, slots = config.sizes(shapes)
        except ValueError as error:
            problem = error
        # A stage without states must not limit the slots, nor a stage without attention the window.
        # An error is reduced as 0 blocks first, so that all stages raise instead of waiting.
        has_states, window = bool(shapes.states), 0
        if shapes.attention:
            window = shapes.window or _UNLIMITED
        if not has_states and problem is None:
            slots = _UNLIMITED
        blocks, slots, any_states, window = link.all_reduce_max(
            (-blocks, -slots, int(has_states), window)
        )
        if not blocks:
            raise problem or ValueError(
                "the memory of another pipeline stage does not fit the states of "
                f"{config.max_num_seqs} sequences and {config.min_blocks_text}: give it more "
                "memory"
            )
        return CacheSizes(
            num_blocks=-blocks,
            num_slots=-slots if any_states else 1,
            has_states=bool(any_states),
            window=window if 0 < window < _UNLIMITED else None,
        )

    def check_drafts(self, config: EngineConfig) -> None:
        """Raise ValueError if the drafts of a sequence do not fit a step."""
        count, blocks = config.num_speculative_tokens, self.num_blocks
        max_tokens = min(config.max_num_batched_tokens, blocks * config.block_size)
        if count and count + 1 > max_tokens:
            raise ValueError(
                f"num-speculative-tokens is {count}: a step verifies them together with the "
                f"token before, but {count + 1} tokens do not fit a step of "
                f"{config.max_num_batched_tokens} tokens and a cache of {blocks} blocks of "
                f"{config.block_size}: use at most {max_tokens - 1}"
            )
