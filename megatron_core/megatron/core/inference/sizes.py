# SPDX-License-Identifier: Apache-2.0
"""How an engine is sized, and what the caches of all pipeline stages have alike."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.stages import StageLink

#: Tokens of a row that blocks are counted for where tokens take no memory, only states do.
LONGEST_ROW = 1 << 20

#: More than there is of anything.
_EVERYTHING = 1 << 60


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine is sized.

    Args:
        max_rows: rows that run at a time.
        max_step_tokens: new tokens of a step: longer prompts are computed in several.
        block_size: tokens of a block of the cache, a power of two from 16 on.
        num_blocks: blocks of the cache; None takes `memory_bytes`.
        memory_bytes: of pages and states together. Slots for the states of `max_rows` rows come
            first, then snapshots of states for the prefix cache, at most a quarter of what is left,
            then pages.
        prefix_caching: reuse what was computed for requests that begin alike.
        token_multiple: pad the tokens of a step to a multiple of this: with sequence parallelism
            the number of ranks, each of which has as many.
        asynchronous: plan a step while the one before it runs. What ends an output (a stop token,
            `Engine.abort`, `Engine.finish`) then arrives one step late.
        num_speculative_tokens: drafts that a step verifies of a row at most; 0 is no speculation.
    """

    max_rows: int = 16
    max_step_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    prefix_caching: bool = True
    token_multiple: int = 1
    asynchronous: bool = False
    num_speculative_tokens: int = 0

    @property
    def least_blocks(self) -> int:
        """Blocks of the smallest cache: a step verifies all drafts of a row and one more token."""
        return -(-(1 + self.num_speculative_tokens) // self.block_size)

    @property
    def least_pages(self) -> str:
        """The smallest cache in words."""
        number = "one block" if self.least_blocks == 1 else f"{self.least_blocks} blocks"
        return f"{number} of {self.block_size} tokens"

    def row_slots(self, shapes: CacheShapes) -> int:
        """Return the state slots that `max_rows` rows need, without snapshots for later rows."""
        if not shapes.states:
            return 1
        # A row that goes on from a snapshot needs the snapshot and a slot of its own.
        slots = self.max_rows + (1 if self.prefix_caching else 0)
        # Drafts need the states before them as well.
        return slots + (self.max_rows if self.num_speculative_tokens else 0)

    def row_state_bytes(self, shapes: CacheShapes) -> int:
        """Return the bytes of these slots and of the one that is nobody's."""
        return (self.row_slots(shapes) + 1) * shapes.state_bytes

    def sizes(self, shapes: CacheShapes, max_length: int | None = None) -> tuple[int, int]:
        """Return the blocks and the state slots of the cache of a model.

        Args:
            shapes: what the model keeps.
            max_length: longest sequence that it takes; None means no limit.

        Raises:
            ValueError: the memory does not hold the states of the rows and the least blocks.
        """
        block = shapes.token_bytes * self.block_size
        pages = self.least_blocks * block
        slots = self.row_slots(shapes)
        if self.num_blocks is not None:
            snapshots = 2 * self.max_rows if self.prefix_caching and shapes.states else 0
            return self.num_blocks, slots + snapshots
        if self.memory_bytes is None:
            raise ValueError("an engine needs num_blocks or memory_bytes: give one of them")
        # One more slot than can be taken: nobody's.
        left = self.memory_bytes - (slots + 1) * shapes.state_bytes
        if left < pages:
            least = (slots + 1) * shapes.state_bytes + pages
            states = f"the states of {self.max_rows} rows and " if shapes.states else ""
            raise ValueError(
                f"{self.memory_bytes:,} bytes of memory do not hold {states}{self.least_pages}: "
                f"give at least {least:,}"
            )
        if shapes.states and self.prefix_caching:
            # Snapshots leave the least blocks, however little memory there is.
            snapshot_bytes = min(left // 4, left - pages)
            snapshots = min(snapshot_bytes // shapes.state_bytes, 16 * self.max_rows)
            slots, left = slots + snapshots, left - snapshots * shapes.state_bytes
        if not block:  # a model without attention: blocks are mere bookkeeping
            longest = min(max_length or LONGEST_ROW, LONGEST_ROW)
            return self.max_rows * -(-longest // self.block_size), slots
        return left // block, slots


@dataclass(frozen=True)
class CacheSizes:
    """What the caches of all pipeline stages have alike.

    Args:
        num_blocks: of each attention layer.
        num_slots: of states.
        has_states: whether any layer of the model has states.
        window: how far the attention layer sees that sees most; None if one sees all.
    """

    num_blocks: int
    num_slots: int
    has_states: bool
    window: int | None

    @staticmethod
    def agreed(
        config: EngineConfig, shapes: CacheShapes, max_length: int | None, link: StageLink
    ) -> CacheSizes:
        """Return the sizes that hold on every stage: rows take the same blocks and slots on each.

        Raises:
            ValueError: the memory of some stage does not hold the least.
        """
        blocks, slots, problem = 0, 0, None
        try:
            blocks, slots = config.sizes(shapes, max_length)
        except ValueError as error:
            problem = error
        # Slots of a stage without states, and the window of one without attention, do not count.
        has_states, sees = bool(shapes.states), 0
        if shapes.attention:
            sees = shapes.window or _EVERYTHING
        if not has_states and problem is None:
            slots = _EVERYTHING
        blocks, slots, has, sees = link.largest((-blocks, -slots, int(has_states), sees))
        if not blocks:
            raise problem or ValueError(
                "the memory of another pipeline stage does not hold the states of "
                f"{config.max_rows} rows and {config.least_pages}: give it more"
            )
        return CacheSizes(
            num_blocks=-blocks,
            num_slots=-slots if has else 1,
            has_states=bool(has),
            window=sees if 0 < sees < _EVERYTHING else None,
        )

    def check_drafts(self, config: EngineConfig) -> None:
        """Raise ValueError for more drafts than a step can verify."""
        count, blocks = config.num_speculative_tokens, self.num_blocks
        most = min(config.max_step_tokens, blocks * config.block_size)
        if count and count + 1 > most:
            raise ValueError(
                f"num-speculative-tokens is {count}: a step verifies them with the token before, "
                f"and {count + 1} tokens do not fit a step of {config.max_step_tokens} tokens and "
                f"a cache of {blocks} blocks of {config.block_size}: use at most {most - 1}"
            )
