# SPDX-License-Identifier: Apache-2.0
"""Layer patterns: one symbol a block, and how blocks are split over pipeline stages.

    symbol  block
    *       attention
    +       latent attention
    G       gated delta net
    M       Mamba-2
    -       MLP
    E       mixture of experts

A GPT of L layers is `*-` repeated L times, with `*E` where a layer has experts; Qwen3-Next is
`GEGEGE*E` repeated. Each `/` starts the blocks of one depth of multi-token prediction, the same in
all depths: `*-*-/*-/*-` has two.

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

ATTENTION, LATENT, DELTA_NET, MAMBA = "*", "+", "G", "M"
DENSE, EXPERTS = "-", "E"

#: What mixes tokens, what keeps a state of them instead of keys and values, and what mixes none.
ATTENTIONS, RECURRENT, FEED_FORWARD = ATTENTION + LATENT, DELTA_NET + MAMBA, DENSE + EXPERTS

#: Stands between the blocks of two virtual pipeline stages.
CUT = "|"

#: Stands before the blocks of each depth of multi-token prediction.
FURTHER = "/"

_KNOWN = (
    "'*' (attention), '+' (latent attention), 'G' (gated delta net), 'M' (Mamba-2), '-' (MLP) and "
    "'E' (experts)"
)


@dataclass(frozen=True)
class Pattern:
    """A written pattern, taken apart; `pattern_problems` must have found nothing.

    Args:
        main: the blocks of the model, with splits.
        further: the blocks of each depth of multi-token prediction; empty if there are none.
        depths: how many there are.
    """

    main: str
    further: str = ""
    depths: int = 0

    @staticmethod
    def of(text: str) -> Pattern:
        """Take a written pattern apart; a `/` with nothing after it means nothing."""
        main, *further = text.split(FURTHER)
        further = [pattern for pattern in further if pattern]
        return Pattern(main, further[0] if further else "", len(further))

    @property
    def blocks(self) -> str:
        """The blocks of the model alone."""
        return symbols_of(self.main)


def symbols_of(pattern: str) -> str:
    """Return the blocks of a pattern alone, without the splits between stages."""
    return pattern.replace(CUT, "")


def ffn_of(symbols: str) -> str | None:
    """Return what follows attention in each layer of a GPT; None if the blocks are not of one.

    A GPT's blocks come in pairs, attention (all of them latent or none) and an MLP or experts.
    """
    for attention in ATTENTIONS:
        if re.fullmatch(f"([{attention}][{FEED_FORWARD}])+", symbols):
            return symbols[1::2]
    return None


def symbol_problems(pattern: str) -> list[str]:
    """List what is wrong with the symbols of blocks and splits; empty if nothing is."""
    symbols, what = symbols_of(pattern), f"layer pattern {pattern!r}"
    if not symbols:
        return [f"{what} must be one or more of {_KNOWN}, with '|' where a pipeline stage ends"]
    problems = []
    known = ATTENTIONS + RECURRENT + FEED_FORWARD + CUT
    for place, symbol in enumerate(pattern, start=1):
        if symbol not in known:
            reason = "is unknown"
            if symbol == "D":
                reason = "would be sparse attention, which is not built here"
            problems.append(f"{what}: {symbol!r} at {place} {reason}: use {_KNOWN}")
    if ATTENTION in symbols and LATENT in symbols:
        problems.append(f"{what} has both '*' and '+': all attention is latent or none: keep one")
    return problems


def written_problems(text: str) -> list[str]:
    """List what is wrong with a written pattern and its further parts; empty if nothing is."""
    main, *parts = text.split(FURTHER)
    parts = [part for part in parts if part]
    found = symbol_problems(main)
    for part in dict.fromkeys(parts):
        if CUT in part:
            found.append(
                f"layer pattern {text!r}: '|' behind a '/' in {part!r}: multi-token prediction is "
                "in the last pipeline stage: cut before the '/' alone"
            )
        found += symbol_problems(part.replace(CUT, ""))
    if len(set(parts)) > 1:
        found.append(
            f"layer pattern {text!r}: the parts behind '/' differ ({', '.join(parts)}): all depths "
            "of multi-token prediction have the same blocks: write them alike"
        )
    kinds = set(main + "".join(parts))
    if not found and {ATTENTION, LATENT} <= kinds:
        found.append(f"layer pattern {text!r} has both '*' and '+': keep one")
    return found


def layer_blocks(symbols: str) -> list[tuple[int, int]]:
    """Return the [first, last) blocks of each layer of a pattern without splits.

    A block that mixes tokens and the MLP or experts after it are one layer, any other block is one
    by itself.
    """
    layer = f"[{re.escape(ATTENTIONS)}{RECURRENT}][{FEED_FORWARD}]|."
    return [(found.start(), found.end()) for found in re.finditer(layer, symbols)]


#: A layer of a GPT is an attention and an MLP block.
_LAYER = ATTENTION + DENSE

#: Symbols that a layout may have once its repetitions are written out.
_LONGEST_LAYOUT = 100_000


@dataclass(frozen=True)
class StageSplit:
    """The blocks of every virtual stage.

    Args:
        stages: p, the ranks of the pipeline.
        ranges: [first, last) blocks of each virtual stage, in order; each starts where the one
            before ends.
        layer_blocks: blocks of a layer, where layers are spoken of: 2 of a GPT, 1 of a hybrid.

    Raises:
        ValueError: ranges that leave blocks out, or as many as do not divide over the stages.
    """

    stages: int
    ranges: tuple[tuple[int, int], ...]
    layer_blocks: int = len(_LAYER)

    def __post_init__(self) -> None:
        ends = [0, *(last for _, last in self.ranges)]
        starts = [first for first, _ in self.ranges]
        if starts != ends[:-1] or ends != sorted(ends):
            raise ValueError(f"the blocks {self.ranges} of the stages do not follow one another")
        if self.stages < 1 or not self.ranges or len(self.ranges) % self.stages:
            raise ValueError(f"{len(self.ranges)} parts do not divide over {self.stages} stages")

    @property
    def chunks(self) -> int:
        """Chunks on each rank."""
        return len(self.ranges) // self.stages

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pattern."""
        return self.ranges[-1][1]

    def blocks(self, stage: int, chunk: int) -> tuple[int, int]:
        """Return the [first, last) blocks of a stage's chunk."""
        return self.ranges[chunk * self.stages + stage]

    def describe(self) -> str:
        """Say how many layers each stage has: "3|2 layers", or "2+1|1+1 layers" in two chunks.

        In blocks where a layer of two blocks is split, and of a hybrid: "3|5 blocks".
        """
        each = self.layer_blocks
        whole = each > 1 and all(last % each == 0 for _, last in self.ranges)
        size, noun = (each, "layers") if whole else (1, "blocks")
        counts = [str((last - first) // size) for first, last in self.ranges]
        shown = ("+".join(counts[stage :: self.stages]) for stage in range(self.stages))
        return f"{CUT.join(shown)} {noun}"

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
        """Give every virtual stage as many layers as any other, with the exceptions asked for.

        Args:
            num_layers: L of the model.
            stages: p.
            chunks: v, of each stage.
            first_layers, last_layers: of the first and the last stage, in all its chunks together;
                the other stages share the rest.
            count_embedding, count_loss: take it for a layer, so that its virtual stage has one
                less.
            layer_blocks: blocks of a layer.

        Raises:
            ValueError: all of `even_problems`.
        """
        chosen = {
            "chunks": chunks,
            "first_layers": first_layers,
            "last_layers": last_layers,
            "count_embedding": count_embedding,
            "count_loss": count_loss,
            "layer_blocks": layer_blocks,
        }
        _refuse(even_problems(num_layers, stages, **chosen))
        if first_layers is None and last_layers is None:
            size = (num_layers + count_embedding + count_loss) // (stages * chunks)
            layers = [size] * (stages * chunks)
            layers[0] -= count_embedding
            layers[-1] -= count_loss
        else:
            others = stages - (first_layers is not None) - (last_layers is not None)
            rest = num_layers - (first_layers or 0) - (last_layers or 0)
            layers = [rest // max(others, 1) // chunks] * stages
            if first_layers is not None:
                layers[0] = first_layers // chunks
            if last_layers is not None:
                layers[-1] = last_layers // chunks
            layers *= chunks
        return _from_sizes(stages, (layer_blocks * count for count in layers), layer_blocks)

    @staticmethod
    def balanced(symbols: str, stages: int, *, blocks_of_layer: int = len(_LAYER)) -> StageSplit:
        """Give every stage one chunk of as many layers, the first stages one more where they do not
        divide.

        Args:
            symbols: the blocks of the model; no layer of them is split.
            stages: p.
            blocks_of_layer: `layer_blocks` of the split.

        Raises:
            ValueError: fewer layers than stages.
        """
        layers = layer_blocks(symbols)
        if not 1 <= stages <= len(layers):
            raise ValueError(
                f"{len(layers)} layers do not fill {stages} pipeline stages: use 1 to {len(layers)}"
            )
        each, more = divmod(len(layers), stages)
        firsts = [stage * each + min(stage, more) for stage in range(stages + 1)]
        ends = [0, *(layers[first - 1][1] for first in firsts[1:])]
        return StageSplit(stages, tuple(itertools.pairwise(ends)), blocks_of_layer)

    @staticmethod
    def from_pattern(pattern: str, stages: int, *, ffn_pattern: str | None = None) -> StageSplit:
        """Cut where the pattern has a `|`.

        Args:
            pattern: such as "*-*-|*-*|-*-|".
            stages: p, which divides the number of parts.
            ffn_pattern: of a GPT, what follows attention in each of its layers; None allows any
                pattern.

        Raises:
            ValueError: all of `pattern_problems`.
        """
        _refuse(pattern_problems(pattern, stages, ffn_pattern=ffn_pattern))
        pairs = ffn_of(symbols_of(pattern)) is not None
        return _from_sizes(stages, map(len, pattern.split(CUT)), len(_LAYER) if pairs else 1)

    @staticmethod
    def from_layout(layout: str, stages: int, *, num_layers: int) -> StageSplit:
        """Split a GPT as a layout specifies.

        Args:
            layout: such as "Et*2|(tt|)*2,L"; commas and blanks mean nothing.
            stages: p, which divides the number of parts.
            num_layers: L of the model.

        Raises:
            ValueError: all of `layout_problems`.
        """
        _refuse(layout_problems(layout, stages, num_layers=num_layers))
        parts = _written_out(layout)[0].split(CUT)
        sizes = (len(_LAYER) * part.count("t") for part in parts)
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
    """List why `StageSplit.even` cannot be, each with its fix; empty if it can."""
    noun = "layers" if layer_blocks > 1 else "blocks"
    named = {noun: num_layers, "pipeline stages": stages, "chunks of a stage": chunks}
    found = [f"{size} {name}: use 1 or more" for name, size in named.items() if size < 1]
    ends = {"first": first_layers, "last": last_layers}
    given = {name: layers for name, layers in ends.items() if layers is not None}
    for name, layers in given.items():
        if layers < 0:
            found.append(f"{layers} {noun} in the {name} pipeline stage: use 0 or more")
        elif chunks > 1 and layers % chunks:
            found.append(
                f"{layers} {noun} in the {name} pipeline stage do not divide over its {chunks} "
                f"chunks: use a multiple of {chunks}"
            )
    counted = [w for w, on in (("embedding", count_embedding), ("loss", count_loss)) if on]
    if given and counted:
        found.append(
            f"the {noun} of the {' and the '.join(given)} pipeline stage are given, so the "
            f"{' and the '.join(counted)} cannot be counted as a layer: use one or the other"
        )
    if given and stages == 1:
        found.append(f"{noun} of the first or the last pipeline stage need 2 stages or more")
    if found:
        return found
    if not given:
        return _uneven(f"{num_layers} {noun}", num_layers, counted, stages * chunks)
    return _uneven_rest(f"{num_layers} {noun}", num_layers, given, stages=stages, chunks=chunks)


def pattern_problems(pattern: str, stages: int, *, ffn_pattern: str | None = None) -> list[str]:
    """List why a pattern cannot be split like that, each with its fix; empty if it can."""
    found = symbol_problems(pattern)
    found += part_problems(f"layer pattern {pattern!r}", pattern, stages)
    if ffn_pattern is None:
        return found
    wanted = "".join(ATTENTION + kind for kind in ffn_pattern)
    if symbols_of(pattern).replace(LATENT, ATTENTION) != wanted:
        same = set(ffn_pattern) == {DENSE}
        # Of another number of layers: the pattern must specify which of them have experts.
        others = symbols_of(pattern).replace(ATTENTION, "")
        free = EXPERTS in others and len(others) != len(ffn_pattern)
        kinds = "'*-' or '*E'" if free else "'*-'"
        model = f"{kinds} for each of the {len(ffn_pattern)} layers" if same else f"{wanted!r}"
        found.append(f"layer pattern {pattern!r} without its '|' must be {model}")
    return found


def layout_problems(layout: str, stages: int, *, num_layers: int) -> list[str]:
    """List why a layout cannot be, each with its fix; empty if it can."""
    text, found = _written_out(layout)
    what = f"pipeline layout {layout!r}"
    if found:  # repetitions may be wrong, so nothing can be counted
        missing = {"E": "embedding", "L": "loss"}
        return found + [
            f"{what} has no {symbol}: write the {name} once"
            for symbol, name in missing.items()
            if symbol not in layout
        ]
    found = part_problems(what, text, stages)
    for symbol, name, place in (("E", "embedding", "begins"), ("L", "loss", "ends")):
        count = text.count(symbol)
        if count != 1:
            found.append(f"{what} has {count} {symbol}: write the {name} once")
        elif not (text.startswith("E") if symbol == "E" else text.endswith("L")):
            found.append(f"{what}: the {name} {place} the model: {place[:-1]} with its {symbol}")
    if text.count("t") != num_layers:
        found.append(f"{what} has {text.count('t')} t for {num_layers} layers: write one for each")
    return found


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


def _from_sizes(stages: int, sizes: Iterable[int], layer_blocks: int) -> StageSplit:
    """Return the split whose virtual stages have so many blocks."""
    ends = [0, *itertools.accumulate(sizes)]
    return StageSplit(stages, tuple(itertools.pairwise(ends)), layer_blocks)


def part_problems(what: str, text: str, stages: int) -> list[str]:
    """List why the parts of a text do not divide over stages; `what` names it."""
    parts = text.count(CUT) + 1
    if stages < 1:
        return [f"{stages} pipeline stages: use 1 or more"]
    if parts % stages == 0:
        return []
    return [
        f"{what} has {parts} parts for {stages} pipeline stages: write a multiple of {stages} "
        "with '|' between them (a part may be empty)"
    ]


def _uneven(shown: str, num_layers: int, counted: list[str], virtual_stages: int) -> list[str]:
    """List what keeps layers, and what counts as one, from dividing over all virtual stages."""
    total = num_layers + len(counted)
    if total % virtual_stages == 0:
        return []
    and_more = "".join(f" and the {what}" for what in counted)
    return [
        f"{shown}{and_more} do not divide over {virtual_stages} virtual pipeline stages: use "
        "another number of them or of stages, give the first or the last stage another number, or "
        "write where to cut, in a layout or by '|' in the layer pattern"
    ]


def _uneven_rest(
    shown: str, num_layers: int, given: dict[str, int], *, stages: int, chunks: int
) -> list[str]:
    """List what keeps the layers outside the first and the last stage from dividing."""
    rest, others = num_layers - sum(given.values()), stages - len(given)
    taken = " and ".join(f"{layers} in the {name}" for name, layers in given.items())
    if rest >= 0 and (rest % (others * chunks) == 0 if others else rest == 0):
        return []
    if rest < 0:
        return [f"{taken} pipeline stage are more than the {shown}: use fewer"]
    return [
        f"{shown} leave {rest} with {taken} pipeline stage, which do not divide over "
        f"the {others} other stages of {chunks} chunks each: use other numbers or write where to "
        "cut"
    ]


def _written_out(layout: str) -> tuple[str, list[str]]:
    """Return a layout without repetitions, groups, commas and blanks, and what is wrong with it."""
    found: list[str] = []
    levels: list[list[str]] = [[]]  # of open parentheses; each a list of what may be repeated
    opened: list[int] = []
    for match in re.finditer(r"\*\s*[0-9]+|\S", layout):
        token, place = match.group(), match.start() + 1
        if token in ("E", "t", "L", CUT):
            levels[-1].append(token)
        elif token == "(":
            levels.append([])
            opened.append(place)
        elif token == ")" and opened:
            opened.pop()
            group = "".join(levels.pop())
            levels[-1].append(group)
        elif token == ")":
            found.append(f"')' at {place} closes nothing: write a '(' before it or leave it out")
        elif token[0] == "*" and len(token) > 1 and levels[-1]:
            times = int(token[1:]) if len(token) < 10 else _LONGEST_LAYOUT
            if len(levels[-1][-1]) * times < _LONGEST_LAYOUT:
                levels[-1][-1] *= times
            else:
                found.append(f"{token!r} at {place} repeats too often: use a smaller number")
        elif token[0] == "*":
            found.append(f"{token!r} at {place}: write what to repeat and how often, as in 't*3'")
        elif token != ",":
            found.append(
                f"{token!r} at {place} is unknown: use E (embedding), t (layer), L (loss), | "
                "between parts, and (...)*n"
            )
    found += [f"'(' at {place} is never closed: write a ')'" for place in opened]
    text = "".join(itertools.chain.from_iterable(levels))
    return text, [f"pipeline layout {layout!r}: {problem}" for problem in found]
