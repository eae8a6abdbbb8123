# SPDX-License-Identifier: Apache-2.0
"""Layer patterns: one symbol a block, and how blocks are split over pipeline stages.

    symbol  block
    *       attention
    W       attention of a second kind, such as sliding window attention
    +       latent attention
    G       gated delta net
    M       Mamba-2
    C       gated short convolution
    -       MLP
    E       mixture of experts
    (M*)    parallel blocks: one norm, and the sum of the outputs of several mixers

A GPT of L layers is `*-` repeated L times, with `*E` where a layer has experts and `W` where its
attention is of the second kind; Qwen3-Next is `GEGEGE*E` repeated. Each `/` starts the blocks of
one depth of multi-token prediction, the same in all depths: `*-*-/*-/*-` has two.

`StageSplit` is pure data: the blocks of every virtual pipeline stage. With p stages of v chunks
each, chunk c of stage r is virtual stage g = c · p + r; data goes from g to g + 1. The embedding is
in the first virtual stage; final norm, head and loss are in the last. A virtual stage may have any
number of blocks, none included. A split is given in one of three ways:

    numbers   evenly, or with other numbers of layers in the first and the last stage
    pattern   "*-*-|*-*|-*-|"    `|` splits between any two blocks
    layout    "Et*2|(tt|)*2,L"   E embedding, t layer, L loss, `|` splits, `*n` repeats the item
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

ATTENTION, WINDOW, LATENT = "*", "W", "+"
DELTA_NET, MAMBA, SHORT_CONV = "G", "M", "C"
DENSE, EXPERTS = "-", "E"

#: Blocks with a key-value cache, blocks with a recurrent state, blocks without mixing of tokens.
ATTENTIONS = ATTENTION + WINDOW + LATENT
RECURRENT, FEED_FORWARD = DELTA_NET + MAMBA + SHORT_CONV, DENSE + EXPERTS

#: Separates the blocks of two virtual pipeline stages.
STAGE_SEPARATOR = "|"

#: Enclose parallel blocks.
GROUP_START, GROUP_END = "(", ")"

#: Precedes the blocks of each layer of multi-token prediction.
MTP_SEPARATOR = "/"

_SYMBOL_HELP = (
    "'*' (attention), 'W' (window attention), '+' (latent attention), 'G' (gated delta net), "
    "'M' (Mamba-2), 'C' (short convolution), '-' (MLP) and 'E' (experts)"
)


@dataclass(frozen=True)
class Pattern:
    """A parsed layer pattern. `layer_pattern_problems` checks the text beforehand.

    Args:
        main: blocks of the decoder, with stage separators.
        mtp_blocks: blocks of each multi-token prediction layer; empty without such layers.
        mtp_num_layers: number of multi-token prediction layers.
    """

    main: str
    mtp_blocks: str = ""
    mtp_num_layers: int = 0

    @staticmethod
    def parse(text: str) -> Pattern:
        """Parse a pattern such as "*-|*-/*-"; a `/` with nothing after it is ignored."""
        main, *mtp_layers = text.split(MTP_SEPARATOR)
        mtp_layers = [blocks for blocks in mtp_layers if blocks]
        return Pattern(main, mtp_layers[0] if mtp_layers else "", len(mtp_layers))

    @property
    def blocks(self) -> str:
        """Blocks of the decoder with parentheses, without stage separators."""
        return without_stages(self.main)


def without_stages(pattern: str) -> str:
    """Return the blocks of a pattern with parentheses, without its stage separators."""
    return pattern.replace(STAGE_SEPARATOR, "")


def symbols_of(pattern: str) -> str:
    """Return the symbols of the blocks of a pattern, without stage separators and parentheses."""
    return re.sub(f"[{STAGE_SEPARATOR}{GROUP_START}{GROUP_END}]", "", pattern)


def parallel_groups(pattern: str) -> list[tuple[int, int]]:
    """Return the range [start, end) of the blocks of each norm: of parallel blocks, or of one."""
    groups: list[tuple[int, int]] = []
    for token in re.findall(r"\(.*?\)|[^()|]", pattern):
        start = groups[-1][1] if groups else 0
        groups.append((start, start + len(symbols_of(token))))
    return groups


def ffn_of(symbols: str) -> str | None:
    """Return the MLP or experts symbol of each layer of a GPT; None for other models.

    The blocks of a GPT are pairs of attention (latent in all layers or in none) and an MLP or
    experts, one after the other.
    """
    for attention in (ATTENTION + WINDOW, LATENT):
        if re.fullmatch(f"([{attention}][{FEED_FORWARD}])+", symbols):
            return symbols[1::2]
    return None


def symbol_problems(pattern: str) -> list[str]:
    """List the errors in the symbols of a pattern without `/`; empty if it is valid."""
    symbols, subject = symbols_of(pattern), f"layer pattern {pattern!r}"
    if not symbols and not pattern.strip(STAGE_SEPARATOR):
        return [
            f"{subject} must be one or more of {_SYMBOL_HELP}, with '|' where a pipeline stage ends"
        ]
    problems = []
    allowed = ATTENTIONS + RECURRENT + FEED_FORWARD + STAGE_SEPARATOR + GROUP_START + GROUP_END
    for position, symbol in enumerate(pattern, start=1):
        if symbol not in allowed:
            reason = "is unknown"
            if symbol == "D":
                reason = "would be sparse attention, which is not supported"
            problems.append(f"{subject}: {symbol!r} at {position} {reason}: use {_SYMBOL_HELP}")
    problems += _mixed_attention_problems(subject, symbols)
    return problems + _group_problems(subject, pattern)


def _group_problems(subject: str, pattern: str) -> list[str]:
    """List the problems of the parentheses of a pattern."""
    outside = re.sub(r"\([^()]*\)", "", pattern)
    if GROUP_START in outside or GROUP_END in outside:
        return [
            f"{subject}: parentheses must be balanced and not nested: write (*-), for example, for "
            "parallel blocks"
        ]
    return [
        f"{subject}: {group!r} must have two blocks or more, and no '|': all parallel blocks are "
        "in one pipeline stage"
        for group in re.findall(r"\([^()]*\)", pattern)
        if STAGE_SEPARATOR in group or len(symbols_of(group)) < 2
    ]


def _mixed_attention_problems(subject: str, symbols: Iterable[str]) -> list[str]:
    """List the problem of a pattern with latent and other attention."""
    return [
        f"{subject} has both {symbol!r} and '+': either all attention is latent or none: keep one"
        for symbol in (ATTENTION, WINDOW)
        if symbol in symbols and LATENT in symbols
    ]


def layer_pattern_problems(text: str) -> list[str]:
    """List the errors in a layer pattern, which may have `/` and `|`; empty if it is valid."""
    main, *mtp_layers = text.split(MTP_SEPARATOR)
    mtp_layers = [blocks for blocks in mtp_layers if blocks]
    problems = symbol_problems(main)
    for blocks in dict.fromkeys(mtp_layers):
        if STAGE_SEPARATOR in blocks:
            problems.append(
                f"layer pattern {text!r}: '|' after a '/' in {blocks!r}: multi-token prediction is "
                "in the last pipeline stage: write '|' only before the first '/'"
            )
        if GROUP_START in blocks:
            problems.append(
                f"layer pattern {text!r}: parallel blocks in {blocks!r}: multi-token prediction "
                "has none: write its blocks one after the other"
            )
        problems += symbol_problems(blocks.replace(STAGE_SEPARATOR, ""))
    if len(set(mtp_layers)) > 1:
        problems.append(
            f"layer pattern {text!r}: the blocks after each '/' differ ({', '.join(mtp_layers)}): "
            "all multi-token prediction layers have the same blocks: repeat one of them"
        )
    symbols = set(main + "".join(mtp_layers))
    return problems or _mixed_attention_problems(f"layer pattern {text!r}", symbols)


def layer_blocks(pattern: str) -> list[tuple[int, int]]:
    """Return the block range [start, end) of each layer of a pattern without stage separators.

    A block that mixes tokens, or parallel blocks, form one layer with the MLP or experts after
    them; any other block is a layer of its own.
    """
    mixers = f"[{re.escape(ATTENTIONS)}{RECURRENT}]"
    layers = re.findall(rf"\(.*?\)[{FEED_FORWARD}]?|{mixers}[{FEED_FORWARD}]|.", pattern)
    ends = [0, *itertools.accumulate(len(symbols_of(layer)) for layer in layers)]
    return list(itertools.pairwise(ends))


#: A layer of a GPT: an attention block and an MLP block.
_LAYER = ATTENTION + DENSE

#: Maximum number of symbols of a layout after its repetitions are expanded.
_MAX_LAYOUT_SYMBOLS = 100_000


@dataclass(frozen=True)
class StageSplit:
    """The block range of each virtual pipeline stage.

    Args:
        stages: p, the number of pipeline ranks.
        ranges: block range [start, end) of each virtual stage, in model order and contiguous.
        layer_blocks: number of blocks that messages count as one layer: 2 for a GPT, 1 for a
            hybrid.

    Raises:
        ValueError: the ranges skip blocks, or their number is not a multiple of the stages.
    """

    stages: int
    ranges: tuple[tuple[int, int], ...]
    layer_blocks: int = len(_LAYER)

    def __post_init__(self) -> None:
        ends = [0, *(end for _, end in self.ranges)]
        starts = [start for start, _ in self.ranges]
        if starts != ends[:-1] or ends != sorted(ends):
            raise ValueError(f"the blocks {self.ranges} of the stages are not contiguous")
        if self.stages < 1 or not self.ranges or len(self.ranges) % self.stages:
            raise ValueError(
                f"{len(self.ranges)} virtual stages do not divide over {self.stages} stages"
            )

    @property
    def chunks(self) -> int:
        """Number of model chunks on each rank."""
        return len(self.ranges) // self.stages

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the whole model."""
        return self.ranges[-1][1]

    def blocks(self, stage: int, chunk: int) -> tuple[int, int]:
        """Return the block range [start, end) of a model chunk of a stage."""
        return self.ranges[chunk * self.stages + stage]

    def describe(self) -> str:
        """Format the layer count of each stage: "3|2 layers", or "2+1|1+1 layers" in two chunks.

        The counts are blocks ("3|5 blocks") for a hybrid, and where a boundary splits a layer.
        """
        size, noun = self.layer_blocks, "layers"
        if size == 1 or any(end % size for _, end in self.ranges):
            size, noun = 1, "blocks"
        counts = [str((end - start) // size) for start, end in self.ranges]
        stages = ("+".join(counts[stage :: self.stages]) for stage in range(self.stages))
        return f"{STAGE_SEPARATOR.join(stages)} {noun}"

    @staticmethod
    def even(
        num_layers: int,
        stages: int,
        *,
        chunks: int = 1,
        first_layers: int | None = None,
        last_layers: int | None = None,
        count_embedding: bool = False,
        count_loss: bool = False,
        layer_blocks: int = len(_LAYER),
    ) -> StageSplit:
        """Split the layers evenly over the virtual stages, with the requested exceptions.

        Args:
            num_layers: L, the number of layers of the model.
            stages: p, the number of pipeline stages.
            chunks: v, the number of model chunks per stage.
            first_layers, last_layers: number of layers of the first and of the last stage, over
                all its chunks; the other stages share the remaining layers.
            count_embedding, count_loss: count the embedding or the loss as a layer, so that its
                virtual stage has one layer less.
            layer_blocks: number of blocks per layer.

        Raises:
            ValueError: the problems that `even_problems` lists.
        """
        arguments = {
            "chunks": chunks,
            "first_layers": first_layers,
            "last_layers": last_layers,
            "count_embedding": count_embedding,
            "count_loss": count_loss,
            "layer_blocks": layer_blocks,
        }
        _refuse(even_problems(num_layers, stages, **arguments))
        if first_layers is None and last_layers is None:
            size = (num_layers + count_embedding + count_loss) // (stages * chunks)
            layers = [size] * (stages * chunks)
            layers[0] -= count_embedding
            layers[-1] -= count_loss
        else:
            middle_stages = stages - (first_layers is not None) - (last_layers is not None)
            middle_layers = num_layers - (first_layers or 0) - (last_layers or 0)
            layers = [middle_layers // max(middle_stages, 1) // chunks] * stages
            if first_layers is not None:
                layers[0] = first_layers // chunks
            if last_layers is not None:
                layers[-1] = last_layers // chunks
            layers *= chunks
        return _from_sizes(stages, (layer_blocks * count for count in layers), layer_blocks)

    @staticmethod
    def balanced(symbols: str, stages: int, *, blocks_of_layer: int = len(_LAYER)) -> StageSplit:
        """Split the layers over stages of one chunk; the first stages take one more layer where the
        number of layers is not a multiple of the stages.

        Args:
            symbols: blocks of the model, with parentheses; no layer is split.
            stages: p, the number of pipeline stages.
            blocks_of_layer: `layer_blocks` of the split.

        Raises:
            ValueError: fewer layers than stages.
        """
        layers = layer_blocks(symbols)
        if not 1 <= stages <= len(layers):
            raise ValueError(
                f"{len(layers)} layers do not fill {stages} pipeline stages: use 1 to {len(layers)}"
            )
        quotient, remainder = divmod(len(layers), stages)
        starts = [stage * quotient + min(stage, remainder) for stage in range(stages + 1)]
        ends = [0, *(layers[start - 1][1] for start in starts[1:])]
        return StageSplit(stages, tuple(itertools.pairwise(ends)), blocks_of_layer)

    @staticmethod
    def from_pattern(pattern: str, stages: int, *, ffn_pattern: str | None = None) -> StageSplit:
        """Split a model at each `|` of its layer pattern.

        Args:
            pattern: such as "*-*-|*-*|-*-|".
            stages: p, a divisor of the number of virtual stages in the pattern.
            ffn_pattern: for a GPT, the MLP or experts symbol of each layer; None allows any
                pattern.

        Raises:
            ValueError: the problems that `pattern_problems` lists.
        """
        _refuse(pattern_problems(pattern, stages, ffn_pattern=ffn_pattern))
        pairs = ffn_of(without_stages(pattern)) is not None
        sizes = (len(symbols_of(blocks)) for blocks in pattern.split(STAGE_SEPARATOR))
        return _from_sizes(stages, sizes, len(_LAYER) if pairs else 1)

    def divided_groups(self, pattern: str) -> list[str]:
        """List the parallel blocks of a pattern that lie in several virtual stages."""
        ends, symbols = {end for _, end in self.ranges}, symbols_of(pattern)
        return [
            f"({symbols[start:stop]})"
            for start, stop in parallel_groups(pattern)
            if any(start < end < stop for end in ends)
        ]

    @staticmethod
    def from_layout(layout: str, stages: int, *, num_layers: int) -> StageSplit:
        """Split a GPT as a layout specifies.

        Args:
            layout: such as "Et*2|(tt|)*2,L"; commas and blanks are ignored.
            stages: p, a divisor of the number of virtual stages in the layout.
            num_layers: L, the number of layers of the model.

        Raises:
            ValueError: the problems that `layout_problems` lists.
        """
        _refuse(layout_problems(layout, stages, num_layers=num_layers))
        virtual_stages = _expand_layout(layout)[0].split(STAGE_SEPARATOR)
        sizes = (len(_LAYER) * symbols.count("t") for symbols in virtual_stages)
        return _from_sizes(stages, sizes, len(_LAYER))


def even_problems(
    num_layers: int,
    stages: int,
    *,
    chunks: int = 1,
    first_layers: int | None = None,
    last_layers: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
    layer_blocks: int = len(_LAYER),
) -> list[str]:
    """List why `StageSplit.even` refuses its arguments, each with its fix; empty if it does not."""
    noun = "layers" if layer_blocks > 1 else "blocks"
    counts = {noun: num_layers, "pipeline stages": stages, "chunks of a stage": chunks}
    problems = [f"{count} {name}: use 1 or more" for name, count in counts.items() if count < 1]
    limits = {"first": first_layers, "last": last_layers}
    end_layers = {name: layers for name, layers in limits.items() if layers is not None}
    for name, layers in end_layers.items():
        if layers < 0:
            problems.append(f"{layers} {noun} in the {name} pipeline stage: use 0 or more")
        elif chunks > 1 and layers % chunks:
            problems.append(
                f"{layers} {noun} in the {name} pipeline stage do not divide over its {chunks} "
                f"chunks: use a multiple of {chunks}"
            )
    counted = [name for name, on in (("embedding", count_embedding), ("loss", count_loss)) if on]
    if end_layers and counted:
        problems.append(
            f"the {noun} of the {' and the '.join(end_layers)} pipeline stage are given, so the "
            f"{' and the '.join(counted)} cannot be counted as a layer: use one or the other"
        )
    if end_layers and stages == 1:
        problems.append(f"{noun} of the first or the last pipeline stage need 2 stages or more")
    if problems:
        return problems
    if not end_layers:
        return _uneven(f"{num_layers} {noun}", num_layers, counted, stages * chunks)
    return _uneven_middle(
        f"{num_layers} {noun}", num_layers, end_layers, stages=stages, chunks=chunks
    )


def pattern_problems(pattern: str, stages: int, *, ffn_pattern: str | None = None) -> list[str]:
    """List why a pattern cannot be split over the stages, each with its fix; empty if it can."""
    problems = symbol_problems(pattern)
    problems += virtual_stage_problems(f"layer pattern {pattern!r}", pattern, stages)
    if ffn_pattern is None:
        return problems
    expected = "".join(ATTENTION + symbol for symbol in ffn_pattern)
    plain_pattern = re.sub(f"[{ATTENTIONS}]", ATTENTION, without_stages(pattern))
    if plain_pattern != expected:
        all_dense = set(ffn_pattern) == {DENSE}
        # With another number of layers, the pattern itself must specify which layers have experts.
        ffn_symbols = plain_pattern.replace(ATTENTION, "")
        experts_allowed = EXPERTS in ffn_symbols and len(ffn_symbols) != len(ffn_pattern)
        layer = "'*-' or '*E'" if experts_allowed else "'*-'"
        each_layer = f"{layer} for each of the {len(ffn_pattern)} layers"
        model = each_layer if all_dense else f"{expected!r}"
        problems.append(f"layer pattern {pattern!r} without its '|' must be {model}")
    return problems


def layout_problems(layout: str, stages: int, *, num_layers: int) -> list[str]:
    """List the errors in a layout, each with its fix; empty if it is valid."""
    text, problems = _expand_layout(layout)
    subject = f"pipeline layout {layout!r}"
    if problems:  # with a wrong repetition, the symbols cannot be counted
        missing = {"E": "embedding", "L": "loss"}
        return problems + [
            f"{subject} has no {symbol}: write the {name} once"
            for symbol, name in missing.items()
            if symbol not in layout
        ]
    problems = virtual_stage_problems(subject, text, stages)
    for symbol, name, verb in (("E", "embedding", "begins"), ("L", "loss", "ends")):
        count = text.count(symbol)
        if count != 1:
            problems.append(f"{subject} has {count} {symbol}: write the {name} once")
        elif not (text.startswith("E") if symbol == "E" else text.endswith("L")):
            problems.append(
                f"{subject}: the {name} {verb} the model: {verb[:-1]} with its {symbol}"
            )
    if text.count("t") != num_layers:
        problems.append(
            f"{subject} has {text.count('t')} t for {num_layers} layers: write one for each"
        )
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


def _from_sizes(stages: int, sizes: Iterable[int], layer_blocks: int) -> StageSplit:
    """Return the split with the given number of blocks of each virtual stage."""
    ends = [0, *itertools.accumulate(sizes)]
    return StageSplit(stages, tuple(itertools.pairwise(ends)), layer_blocks)


def virtual_stage_problems(subject: str, text: str, stages: int) -> list[str]:
    """List why the virtual stages of a text do not divide over stages.

    Args:
        subject: the layer pattern or layout, as error messages name it.
        text: blocks with a `|` between virtual stages.
        stages: p, the number of pipeline stages.
    """
    virtual_stages = text.count(STAGE_SEPARATOR) + 1
    if stages < 1:
        return [f"{stages} pipeline stages: use 1 or more"]
    if virtual_stages % stages == 0:
        return []
    return [
        (
            f"{subject} has {virtual_stages} stages for {stages} pipeline ranks: write a multiple "
            f"of {stages}, separated by '|' (a stage may be empty)"
        )
    ]


def _uneven(
    layer_count: str, num_layers: int, counted: list[str], virtual_stages: int
) -> list[str]:
    """List why the layers, with those that count as one, do not divide over the virtual stages."""
    total = num_layers + len(counted)
    if total % virtual_stages == 0:
        return []
    and_counted = "".join(f" and the {name}" for name in counted)
    return [
        f"{layer_count}{and_counted} do not divide over {virtual_stages} virtual pipeline stages: "
        "use another number of layers or stages, give the first or the last stage another number, "
        "or write the boundaries, in a layout or by '|' in the layer pattern"
    ]


def _uneven_middle(
    layer_count: str, num_layers: int, end_layers: dict[str, int], *, stages: int, chunks: int
) -> list[str]:
    """List why the layers outside the first and the last stage do not divide over the others."""
    middle_layers = num_layers - sum(end_layers.values())
    middle_stages = stages - len(end_layers)
    ends = " and ".join(f"{layers} in the {name}" for name, layers in end_layers.items())
    if middle_layers == 0 and middle_stages == 0:
        return []
    if middle_stages and middle_layers >= 0 and middle_layers % (middle_stages * chunks) == 0:
        return []
    if middle_layers < 0:
        return [f"{ends} pipeline stage are more than the {layer_count}: use fewer"]
    return [
        f"{layer_count} leave {middle_layers} with {ends} pipeline stage, which do not divide over "
        f"the {middle_stages} other stages of {chunks} chunks each: use other numbers or write the "
        "boundaries"
    ]


def _expand_layout(layout: str) -> tuple[str, list[str]]:
    """Return a layout with its repetitions expanded, without groups, and the list of its errors."""
    problems: list[str] = []
    levels: list[list[str]] = [[]]  # units that "*n" can repeat, per level of parentheses
    open_positions: list[int] = []
    for match in re.finditer(r"\*\s*[0-9]+|\S", layout):
        token, position = match.group(), match.start() + 1
        if token in ("E", "t", "L", STAGE_SEPARATOR):
            levels[-1].append(token)
        elif token == "(":
            levels.append([])
            open_positions.append(position)
        elif token == ")" and open_positions:
            open_positions.pop()
            group = "".join(levels.pop())
            levels[-1].append(group)
        elif token == ")":
            problems.append(
                f"')' at {position} closes nothing: write a '(' before it, or leave it out"
            )
        elif token[0] == "*" and len(token) > 1 and levels[-1]:
            times = int(token[1:]) if len(token) < 10 else _MAX_LAYOUT_SYMBOLS
            if len(levels[-1][-1]) * times < _MAX_LAYOUT_SYMBOLS:
                levels[-1][-1] *= times
            else:
                problems.append(f"{token!r} at {position} repeats too often: use a smaller number")
        elif token[0] == "*":
            problems.append(
                f"{token!r} at {position}: write what to repeat and how often, as in 't*3'"
            )
        elif token != ",":
            problems.append(
                f"{token!r} at {position} is unknown: use E (embedding), t (layer), L (loss), | "
                "between parts, and (...)*n"
            )
    problems += [f"'(' at {position} is never closed: write a ')'" for position in open_positions]
    text = "".join(itertools.chain.from_iterable(levels))
    return text, [f"pipeline layout {layout!r}: {problem}" for problem in problems]
