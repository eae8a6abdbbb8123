# SPDX-License-Identifier: Apache-2.0
"""What a layer pattern defines: the number of layers, their blocks, and whether the model is a GPT
or a hybrid.

Also which layers have experts, from `--moe-layer-freq` and the layer pattern, and which have the
second kind of attention, from `--window-attn-skip-freq`, `--no-rope-freq` and the pattern.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron.core.models.layer_pattern import (
    ATTENTION,
    ATTENTIONS,
    DENSE,
    EXPERTS,
    LATENT,
    RECURRENT,
    WINDOW,
    Pattern,
    ffn_of,
    layer_blocks,
    layer_pattern_problems,
    symbols_of,
)

if TYPE_CHECKING:
    from megatron.training.config import Config


def mamba_heads(config: Config) -> int:
    """Return the number of heads of a Mamba-2 block, explicit or derived."""
    hybrid = config.hybrid
    return hybrid.mamba_num_heads or 2 * config.model.hidden_size // hybrid.mamba_head_dim


FLAG = "--hybrid-layer-pattern"


def pattern_defaults(user_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option values that a layer pattern implies, by option name."""
    text = user_values.get("hybrid-layer-pattern")
    if text is None or user_values.get("num-layers") is not None:
        return {}
    blocks = Pattern.parse(text).blocks
    ffn = ffn_of(blocks)
    return {"num-layers": max(1, len(symbols_of(blocks) if ffn is None else ffn))}


def written(config: Config) -> Pattern | None:
    """Return the layer pattern; None without one."""
    text = config.hybrid.hybrid_layer_pattern
    return None if text is None else Pattern.parse(text)


def is_hybrid(config: Config) -> bool:
    """Return whether the blocks are not a GPT's pairs of attention and an MLP or experts, one after
    the other."""
    pattern = written(config)
    return pattern is not None and ffn_of(pattern.blocks) is None


def has_attention(config: Config) -> bool:
    """Return whether some block is attention."""
    pattern = written(config)
    return pattern is None or any(
        symbol in pattern.main + pattern.mtp_blocks for symbol in ATTENTIONS
    )


def is_recurrent(config: Config) -> bool:
    """Return whether some block is a gated delta net, Mamba-2 or a short convolution."""
    pattern = written(config)
    return pattern is not None and any(s in pattern.main + pattern.mtp_blocks for s in RECURRENT)


def has(config: Config, symbol: str) -> bool:
    """Return whether some block of the pattern, its MTP depths included, has this symbol."""
    return symbol in (config.hybrid.hybrid_layer_pattern or "")


def with_layers(config: Config) -> Config:
    """Return the config with GPT layers as `num_layers` if the user gave the number of blocks."""
    pattern = written(config)
    ffn = None if pattern is None else ffn_of(pattern.blocks)
    if ffn is None or config.model.num_layers != 2 * len(ffn):
        return config
    return replace(config, model=replace(config.model, num_layers=len(ffn)))


def blocks(config: Config) -> str:
    """Return the blocks of the model, one symbol each."""

    pattern = written(config)
    if pattern is not None and is_hybrid(config):
        return symbols_of(pattern.blocks)
    return "".join(map(str.__add__, attention_kinds(config).symbols, expert_layers(config)))


def mtp_blocks(config: Config) -> str:
    """Return the blocks of each multi-token prediction depth; empty without any."""
    pattern = written(config)
    if pattern is not None and pattern.mtp_blocks:
        return pattern.mtp_blocks
    return blocks(config)[-2:] if config.training.mtp_num_layers else ""


def mtp_num_layers(config: Config) -> int:
    """Return the number of multi-token prediction layers."""
    pattern = written(config)
    if pattern is not None and pattern.mtp_num_layers:
        return pattern.mtp_num_layers
    return config.training.mtp_num_layers or 0


def num_layers(config: Config) -> int:
    """Return the number of layers as checkpoints and recomputation count them: each token-mixing
    block makes a layer with the blocks after it."""
    pattern = written(config)
    return config.model.num_layers if pattern is None else len(layer_blocks(pattern.blocks))


def problems(config: Config) -> Iterator[str]:
    """Yield a message with a fix for each problem of the layer pattern."""
    text, model = config.hybrid.hybrid_layer_pattern, config.model
    if text is None:
        return
    syntax_problems = [f"{FLAG}: {problem}" for problem in layer_pattern_problems(text)]
    yield from syntax_problems
    if syntax_problems:
        return
    pattern, kinds = Pattern.parse(text), set(text)
    latent = config.attention.multi_latent_attention
    if ATTENTION in kinds and latent:
        yield f"{FLAG} {text} has '*' and --multi-latent-attention is given: write '+' for it"
    if LATENT in kinds and not latent:
        yield f"{FLAG} {text} has '+': add --multi-latent-attention, or write '*'"
    if WINDOW in kinds and ATTENTION not in kinds:
        yield f"{FLAG} {text} has 'W' without '*': write '*', to which --window-size applies too"
    if is_hybrid(config):
        num_blocks = len(symbols_of(pattern.blocks))
        if model.num_layers != num_blocks:
            yield (
                f"--num-layers {model.num_layers} and {FLAG} {text}, which has "
                f"{num_blocks} blocks, differ: drop --num-layers"
            )
        yield from _hybrid_problems(config, pattern)
    mtp_num_layers, length = config.training.mtp_num_layers, config.training.seq_length
    if pattern.mtp_num_layers >= length:
        yield (
            f"{FLAG} {text} has {pattern.mtp_num_layers} parts after '/': samples of {length} "
            "tokens are too short to predict so far ahead: use fewer"
        )
    if pattern.mtp_num_layers and mtp_num_layers not in (None, pattern.mtp_num_layers):
        yield (
            f"--mtp-num-layers {mtp_num_layers} and {FLAG} {text}, which has "
            f"{pattern.mtp_num_layers} parts after '/', differ: drop --mtp-num-layers"
        )


def _hybrid_problems(config: Config, pattern: Pattern) -> Iterator[str]:
    """Yield a message for each option that a hybrid's pattern cannot be combined with."""
    if config.training.mtp_num_layers and not pattern.mtp_num_layers:
        yield (
            f"--mtp-num-layers {config.training.mtp_num_layers} with {FLAG} {pattern.main}: write "
            "the blocks of each depth after a '/' of the pattern, as in G-*-/*-"
        )
    if config.experts.moe_layer_freq is not None:
        yield f"--moe-layer-freq has no effect with {FLAG} {pattern.main}: drop it"
    if not has_attention(config):
        position = config.position.position_embedding_type
        if config.position.is_rotary:
            yield (
                f"--position-embedding-type {position} needs attention, and {FLAG} {pattern.main} "
                "has none: use none or learned_absolute"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionKinds:
    """The kind of each attention block, and how the kinds differ.

    Args:
        symbols: `*` or `W`, or `+`, for each attention block of the model without MTP layers.
        windowed: symbols of the kinds that have the window.
        rotary: symbols of the kinds that have rotary embeddings.
        has_second: whether the model or its MTP layers have `W` blocks.
    """

    symbols: str
    windowed: str = ""
    rotary: str = ATTENTIONS
    has_second: bool = False


def attention_kinds(config: Config) -> AttentionKinds:
    """Return the kinds of attention of a model.

    Raises:
        ValueError: a layer list is malformed, contradicts the layer pattern, or the blocks are of
            more than two kinds.
    """
    pattern, chosen = written(config), config.attention
    has_window = chosen.window_size is not None
    if chosen.multi_latent_attention:
        layers = config.model.num_layers if pattern is None else pattern.blocks.count(LATENT)
        return AttentionKinds(symbols=LATENT * layers)
    skip_freq, no_rope_freq = chosen.window_attn_skip_freq, config.position.no_rope_freq
    symbols = ATTENTION * config.model.num_layers
    if pattern is not None:
        symbols = "".join(symbol for symbol in pattern.blocks if symbol in ATTENTION + WINDOW)
    windowed = [has_window] * len(symbols)
    in_pattern = pattern is not None and WINDOW in pattern.main + pattern.mtp_blocks
    if not symbols:  # attention in MTP layers only
        return AttentionKinds(symbols="", windowed=ATTENTION * has_window)
    if in_pattern:
        if skip_freq is not None:
            raise ValueError(
                f"--window-attn-skip-freq {skip_freq} and the 'W' blocks of {FLAG} both specify "
                "which attention has the window: drop one"
            )
        windowed = [has_window and symbol == WINDOW for symbol in symbols]
    elif skip_freq is not None:
        bits = read_layer_list("--window-attn-skip-freq", skip_freq, len(symbols))
        windowed = [bit == "1" for bit in bits]
    rotary = [True] * len(symbols)
    if no_rope_freq is not None:
        bits = read_layer_list("--no-rope-freq", no_rope_freq, len(symbols), nth="1")
        rotary = [bit == "0" for bit in bits]
    kinds = _two_kinds(list(zip(symbols, windowed, rotary, strict=True)), in_pattern=in_pattern)
    return replace(kinds, windowed=WINDOW * has_window, has_second=True) if in_pattern else kinds


def attention_kind_problems(config: Config) -> Iterator[str]:
    """Yield a message for each problem of the options that distinguish attention blocks."""
    try:
        kinds = attention_kinds(config)
    except ValueError as error:
        yield str(error)
        return
    chosen, position = config.attention, config.position
    if chosen.multi_latent_attention or not kinds.symbols:
        return
    if chosen.window_size is not None and not kinds.windowed:
        yield f"--window-size {chosen.window_size} has no effect: no layer has the window: drop it"
    if chosen.window_attn_skip_freq is not None and chosen.window_size is None:
        yield f"--window-attn-skip-freq {chosen.window_attn_skip_freq} needs --window-size: give it"
    if position.is_rotary and not set(kinds.symbols) & set(kinds.rotary):
        yield (
            f"--no-rope-freq {position.no_rope_freq} leaves no layer with rotary embeddings: use "
            "--position-embedding-type none"
        )
    window_rope = position.window_rotary_base or position.window_rope_scaling != "same"
    if window_rope and not (kinds.has_second and WINDOW in kinds.rotary):
        yield (
            "--window-rotary-base and --window-rope-scaling have no effect: no second kind of "
            "attention is rotary: give --window-attn-skip-freq, or drop them"
        )
    if chosen.window_softmax_type is not None and not kinds.has_second:
        yield (
            "--window-softmax-type has no effect: all attention is of one kind: give "
            "--window-attn-skip-freq or --no-rope-freq, or drop it"
        )


def _two_kinds(blocks: list[tuple[str, bool, bool]], *, in_pattern: bool) -> AttentionKinds:
    """Return the kinds of attention blocks.

    Args:
        blocks: (symbol, has the window, is rotary) of each attention block.
        in_pattern: the symbols are final. Otherwise `W` are the blocks with the window, or those
            without positions if the window does not distinguish them.
    """
    kinds = dict.fromkeys(blocks)
    if len(kinds) > 2 or (in_pattern and len(kinds) > len({symbol for symbol, *_ in kinds})):
        raise ValueError(
            "--window-attn-skip-freq and --no-rope-freq make more than two kinds of attention, or "
            f"divide the blocks of a kind of {FLAG}: let both distinguish the same layers"
        )
    if not in_pattern and len(kinds) == 2:
        by_window = len({windowed for _, windowed, _ in kinds}) == 2
        blocks = [
            (WINDOW if (windowed if by_window else not rotary) else ATTENTION, windowed, rotary)
            for _, windowed, rotary in blocks
        ]
    return AttentionKinds(
        symbols="".join(symbol for symbol, *_ in blocks),
        windowed="".join({symbol for symbol, windowed, _ in blocks if windowed}),
        rotary="".join(set(ATTENTIONS) - {symbol for symbol, _, rotary in blocks if not rotary}),
        has_second=len(kinds) == 2,
    )


#: Limit on the number of layers that a list of layers may expand to.
_MAX_LAYERS = 10_000


def expert_layers(config: Config) -> str:
    """Return the block after attention in each layer of a GPT: `E` experts, `-` an MLP.

    Empty for a hybrid, whose pattern names all blocks.

    Raises:
        ValueError: --moe-layer-freq is malformed, or contradicts the layer pattern.
    """
    layers, frequency = config.model.num_layers, config.experts.moe_layer_freq
    if is_hybrid(config):
        return ""
    if config.experts.num_experts is None:
        return DENSE * layers
    pattern = written(config)
    frequency_layers = None if frequency is None else read_frequency(frequency, layers)
    if pattern is None:
        return frequency_layers or EXPERTS * layers
    pattern_layers = ffn_of(pattern.blocks)
    assert pattern_layers is not None, "the pattern is not a hybrid's"
    if frequency_layers is not None and frequency_layers != pattern_layers:
        raise ValueError(
            f"--moe-layer-freq {frequency} and {FLAG} {pattern.main} differ in which layers have "
            "experts: drop --moe-layer-freq"
        )
    return pattern_layers


def read_frequency(text: str, num_layers: int) -> str:
    """Return the block after attention in each of `num_layers` layers, for a --moe-layer-freq.

    Args:
        text: "2" for every second layer, starting with the first; "0,1,1", or a Python expression
            of such a list: "[0]*1+([1]*3+[0])*2".

    Raises:
        ValueError: the text has another form, or another number of layers.
    """
    words = text.replace(" ", "")
    number = _positive_number(words)
    if number:
        return "".join(DENSE if i % number else EXPERTS for i in range(num_layers))
    layer_flags = _layer_flags("--moe-layer-freq", words, num_layers)
    return layer_flags.replace("0", DENSE).replace("1", EXPERTS)


def read_layer_list(flag: str, text: str, num_layers: int, *, nth: str = "0") -> str:
    """Return "0" or "1" for each of `num_layers` layers, for an option of Megatron-LM's form.

    Args:
        flag: the option, for errors.
        text: a list as for --moe-layer-freq, or a number N.
        nth: "0" or "1" of every N-th layer; the remaining layers have the opposite.

    Raises:
        ValueError: the text has another form, or another number of layers.
    """
    words = text.replace(" ", "")
    number = _positive_number(words)
    if not number:
        return _layer_flags(flag, words, num_layers)
    opposite = {"0": "1", "1": "0"}[nth]
    return "".join(opposite if layer % number else nth for layer in range(1, num_layers + 1))


def _positive_number(words: str) -> int:
    """Return the number that a text is; 0 if it is no number above 0."""
    is_number = words.isdecimal() and words.isascii() and len(words) < 6
    return int(words) if is_number else 0


def _layer_flags(flag: str, words: str, num_layers: int) -> str:
    """Return the zeros and ones of a list of layers. Raises ValueError."""
    text, words = words, f"[{words}]" if re.fullmatch("[01](,[01])+", words) else words
    try:
        layer_flags = _LayerListParser(words).read()
    except (ValueError, IndexError, RecursionError):
        raise ValueError(
            f"{flag} {text} is neither a number above 0 nor a list of 0 and 1: write "
            "2, 0,1,1 or [0]*1+[1]*3, for example"
        ) from None
    if len(layer_flags) != num_layers:
        raise ValueError(
            f"{flag} {text} has {len(layer_flags)} layers, --num-layers is "
            f"{num_layers}: write a 0 or 1 for each"
        )
    return layer_flags


def write_frequency(layers: str) -> str:
    """Return the --moe-layer-freq for the layers of `expert_layers`: "[0]*1+[1]*3", for example, or
    "1" if all layers have experts."""
    if set(layers) == {EXPERTS}:
        return "1"
    runs = ((symbol, len(list(run))) for symbol, run in itertools.groupby(layers))
    return "+".join(f"[{int(symbol == EXPERTS)}]*{count}" for symbol, count in runs)


class _LayerListParser:
    """Parses a Python list expression of zeros and ones, such as `[0]*1+[1]*2`."""

    def __init__(self, words: str) -> None:
        self._tokens = re.findall(r"\[[01](?:,[01])*\]|[0-9]+|.", words)
        self._position = 0

    def read(self) -> str:
        """Return the zeros and ones. Raises ValueError or IndexError if the expression is
        invalid."""
        layer_flags = self._sum()
        if self._position < len(self._tokens):
            raise ValueError("unexpected text at the end")
        return layer_flags

    def _next(self) -> str:
        self._position += 1
        return self._tokens[self._position - 1]

    def _consume(self, symbol: str) -> bool:
        """Consume the next token if it is `symbol`, and return whether it was."""
        is_next = self._tokens[self._position : self._position + 1] == [symbol]
        self._position += is_next
        return is_next

    def _sum(self) -> str:
        layer_flags = self._product()
        while self._consume("+"):
            layer_flags += self._product()
        return layer_flags

    def _product(self) -> str:
        layer_flags = self._factor()
        while self._consume("*"):
            times = int(self._next())
            if len(layer_flags) * times > _MAX_LAYERS:
                raise ValueError("more layers than a model has")
            layer_flags *= times
        return layer_flags

    def _factor(self) -> str:
        token = self._next()
        if token == "(":
            layer_flags = self._sum()
            if not self._consume(")"):
                raise ValueError("unbalanced parenthesis")
            return layer_flags
        if not token.startswith("["):
            raise ValueError("not a list")
        return token.strip("[]").replace(",", "")
