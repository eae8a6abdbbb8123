# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers: gated delta net, Mamba-2 and short convolution; their context parallelism.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet as GatedDeltaNet
    from megatron.core.ssm.mamba2 import Mamba2 as Mamba2
    from megatron.core.ssm.mixer import RecurrentCache as RecurrentCache
    from megatron.core.ssm.mixer_config import GatedDeltaNetConfig as GatedDeltaNetConfig
    from megatron.core.ssm.mixer_config import Mamba2Config as Mamba2Config
    from megatron.core.ssm.mixer_config import ShortConvConfig as ShortConvConfig
    from megatron.core.ssm.short_conv import ShortConv as ShortConv

__getattr__, __dir__, __all__ = lazy_exports(__name__)
