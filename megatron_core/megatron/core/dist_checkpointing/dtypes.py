# SPDX-License-Identifier: Apache-2.0
"""The dtypes that a checkpoint can hold, by the names of the safetensors format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({d: n for n, d in DTYPES.items()})


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Return the format's name of `dtype`. Raises ValueError if it has none."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{tensor_name} has dtype {dtype}, which a checkpoint cannot hold; "
            f"convert it to one of {', '.join(DTYPES)}"
        )
    return DTYPE_NAMES[dtype]
