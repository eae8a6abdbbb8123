# SPDX-License-Identifier: Apache-2.0
"""The recurrent mixer of a parity row: its shape, its position in the pattern, and its definition.

On some grids there are too few key heads for headwise context parallelism, on others fewer groups
of Mamba-2 than ranks that share its heads.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt_config import MTPConfig
from megatron.core.models.layer_pattern import ATTENTION, WINDOW
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from tests.parity.plain_gpt import Mixer
from tests.parity.plain_recurrent import PlainDeltaNet, PlainMamba, PlainShortConv
from tests.support.covering_array import Row

#: Layers of a row's model.
LAYERS = 2

#: Sizes of the gated delta net: two value heads share a key head.
KEY_HEADS, VALUE_HEADS, KEY_CHANNELS, VALUE_CHANNELS = 4, 8, 10, 7

#: Sizes of Mamba-2.
MAMBA_HEADS, HEAD_CHANNELS, STATE_CHANNELS = 8, 3, 5

#: Epsilon of all norms of a model with a recurrent mixer. A mixer's output for the first tokens of
#: a document may be nearly zero; normalised with a small epsilon it would amplify rounding.
EPSILON = 1e-2

SYMBOLS = {None: "*", "delta": "G", "mamba": "M", "short_conv": "C"}

DELTA_NET = GatedDeltaNetConfig(
    num_key_heads=KEY_HEADS,
    num_value_heads=VALUE_HEADS,
    key_channels=KEY_CHANNELS,
    value_channels=VALUE_CHANNELS,
    conv_width=4,
)


#: Factors on the gate, x, B, C and dt of a row with multipliers.
PROJECTION_FACTORS = (0.7, 1.4, 0.8, 1.3, 0.6)

#: Taps of a short convolution: its halo may be longer than a document.
SHORT_CONV_WIDTH = 5


def epsilon_of(row: Row) -> float:
    """Return the epsilon of a row's norms."""
    return 1e-5 if row["mixer"] is None else EPSILON


def mamba_config(row: Row) -> Mamba2Config:
    """Return the Mamba-2 mixer of a row."""
    return Mamba2Config(
        num_heads=MAMBA_HEADS,
        head_channels=HEAD_CHANNELS,
        state_channels=STATE_CHANNELS,
        num_groups=row["mamba_groups"],
        conv_width=3,
        conv_bias=row["bias"] != "none",
        bias=row["bias"] == "all",
        norm_groups=row["norm_groups"],
        multipliers=PROJECTION_FACTORS if row["multipliers"] else None,
    )


def _shapes(row: Row) -> dict[str, Any]:
    """Return the shape of a row's recurrent mixer by its field of a model's configuration."""
    if row["mixer"] == "short_conv":
        config = ShortConvConfig(conv_width=SHORT_CONV_WIDTH, bias=row["bias"] == "all")
        return {"short_conv": config}
    return {"delta_net": DELTA_NET} if row["mixer"] == "delta" else {"mamba": mamba_config(row)}


def pattern_of(row: Row, layers: int) -> str:
    """Return the blocks of a row's model: the first layer has the mixer, the last the experts."""
    attention = "+" if row["attention"] == "latent" else "*"
    mixer_symbol = attention if row["mixer"] is None else SYMBOLS[row["mixer"]]
    mixers = [mixer_symbol] + [attention] * (layers - 1)
    if row["second_attention"] is not None:
        mixers[mixers.index(ATTENTION)] = WINDOW
    kinds = ["-"] * (layers - 1) + ["-" if row["experts"] is None else "E"]
    return "".join(mixer + kind for mixer, kind in zip(mixers, kinds, strict=True))


def parallel_pattern(pattern: str) -> str:
    """Return the pattern with the blocks of each layer in parentheses."""
    pairs = zip(pattern[::2], pattern[1::2], strict=True)
    return "".join(f"({mixer}{kind})" for mixer, kind in pairs)


def decoder_settings(row: Row, layers: int) -> dict[str, Any]:
    """Return the fields of a model's configuration that define its blocks.

    Without a recurrent mixer, the model is defined by layers, otherwise by a pattern; MTP layers
    then have the mixer and the experts.
    """
    pattern = pattern_of(row, layers)
    if row["parallel"]:
        return {"num_layers": len(pattern), "pattern": parallel_pattern(pattern)}
    if row["mixer"] is None:
        return {"num_layers": layers, "ffn_pattern": pattern[1::2]}
    return {"num_layers": len(pattern), "pattern": pattern, **_shapes(row)}


def mtp_config(row: Row) -> MTPConfig | None:
    """Return the MTP layers of a row's model; with a recurrent mixer, its pattern defines them."""
    if not row["predictions"]:
        return None
    pattern = "" if row["mixer"] is None else pattern_of(row, 2)
    blocks = pattern[:1] + pattern[-1:]
    return MTPConfig(num_layers=row["predictions"], loss_factor=0.4, pattern=blocks)


def plain_mixers(row: Row) -> tuple[Mixer, ...]:
    """Return the recurrent mixers of the first layers of a row's plain model."""
    if row["mixer"] is None:
        return ()
    if row["mixer"] == "short_conv":
        return (PlainShortConv(),)
    if row["mixer"] == "delta":
        return (
            PlainDeltaNet(
                key_heads=KEY_HEADS,
                value_heads=VALUE_HEADS,
                key_channels=KEY_CHANNELS,
                value_channels=VALUE_CHANNELS,
                epsilon=EPSILON,
            ),
        )
    config = mamba_config(row)
    return (
        PlainMamba(
            heads=MAMBA_HEADS,
            head_channels=HEAD_CHANNELS,
            state_channels=STATE_CHANNELS,
            groups=config.num_groups,
            norm_groups=config.normed_groups,
            factors=config.multipliers or (1.0,) * 5,
            epsilon=EPSILON,
        ),
    )
