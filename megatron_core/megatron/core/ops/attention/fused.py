# SPDX-License-Identifier: Apache-2.0
"""Attention with the fused CUDA kernels in torch: cuDNN's, or FlashAttention-2.

Both return the log-sum-exp, and their backward accepts the log-sum-exp over more keys, so ring
attention can use them block by block.

| | cuDNN | FlashAttention-2 |
|---|---|---|
| GPU | Hopper and newer | Ampere and newer |
| head size | up to 128 | up to 256 |
| queries among more keys, windows | no | yes |
| packed documents | no | yes, with `Mask.cu_seqlens` |
| deterministic backward | no | yes, under `torch.use_deterministic_algorithms(True)` |

cuDNN is preferred because it is faster. Heads whose size is not a multiple of 8 are padded with
zeros. `refusals` returns why a kernel does not apply.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.ops.attention.cpu import Mask
from megatron.core.ops.backend_choice import device_capability

CUDNN, FLASH = "cuDNN", "FlashAttention-2"
#: Smallest compute capability and largest head dimension of each kernel.
CUDNN_CAPABILITY, CUDNN_FEATURES = (9, 0), 128
FLASH_CAPABILITY, FLASH_FEATURES = (8, 0), 256
#: Both kernels load 16 bytes of a head at a time, 8 elements of 16 bits.
FEATURES_MULTIPLE = 8

#: Options that neither kernel supports, and options that only FlashAttention-2 supports.
_UNSUPPORTED = (
    "sinks",
    "a soft cap",
    "attention dropout",
    "documents known by ids alone",
    "rows without keys",
)
_ONLY_FLASH = ("a window", "documents", "queries among more keys")
OPTIONS = (*_ONLY_FLASH, *_UNSUPPORTED)


def refusals(
    device: torch.device, dtype: torch.dtype, features: int, *, options: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return by kernel name why it cannot run an attention, or "" if it can.

    Args:
        device: of the tensors.
        dtype: of query, key and value.
        features: d.
        options: features of the attention in addition to a causal mask, see `options_of`.
    """
    reason = _common_refusal(device, dtype, features, options)
    if reason:
        return {CUDNN: reason, FLASH: reason}
    return {
        CUDNN: _cudnn_refusal(device, features, options),
        FLASH: _flash_refusal(device, features),
    }


def kernel_name(reasons: Mapping[str, str]) -> str | None:
    """Return the fastest kernel without a reason against it, or None."""
    return next((name for name, reason in reasons.items() if not reason), None)


def options_of(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Mask,
    *,
    sinks: torch.Tensor | None = None,
    dropout: object | None = None,
) -> list[str]:
    """Return the names of an attention's features in addition to a causal mask over whole rows.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        mask, sinks, dropout: of the call.
    """
    queries, keys = query.shape[0], key.shape[0]
    shift = mask.shift(queries, keys)
    aligned = queries == keys and shift == 0
    by_ids = mask.query_document_ids is not None or mask.cu_seqlens is None or not aligned
    documents = mask.document_ids is not None or mask.query_document_ids is not None
    # Positions between the last key and the last query that have no key.
    ahead = shift + queries - keys
    has_empty_rows = mask.causal and shift < 0
    has_empty_rows = has_empty_rows or (mask.window is not None and mask.window <= ahead)
    options = {
        "rows without keys": not query.numel() or not key.numel() or has_empty_rows,
        "sinks": sinks is not None,
        "a soft cap": mask.softcap is not None,
        "attention dropout": dropout is not None,
        "documents known by ids alone": documents and by_ids,
        "a window": mask.window is not None,
        "documents": documents and not by_ids,
        "queries among more keys": mask.causal and not aligned,
    }
    return [name for name, present in options.items() if present]


def kernel_of(query: torch.Tensor, key: torch.Tensor, mask: Mask, **options: Any) -> str | None:
    """Return the fused kernel of an attention, or None; arguments as for `options_of`."""
    names = options_of(query, key, mask, **options)
    return kernel_name(refusals(query.device, query.dtype, query.shape[-1], options=names))


def _common_refusal(
    device: torch.device, dtype: torch.dtype, features: int, options: Sequence[str]
) -> str:
    """Return why neither kernel applies, or ""."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they take no {str(dtype).removeprefix('torch.')}"
    for option in _UNSUPPORTED:
        if option in options:
            return f"they take no {option.removeprefix('a ')}"
    if features > FLASH_FEATURES:
        return f"heads of {features} are over {FLASH_FEATURES}"
    return "" if device_capability(device) >= FLASH_CAPABILITY else "the GPU is older than Ampere"


def _cudnn_refusal(device: torch.device, features: int, options: Sequence[str]) -> str:
    """Return why cuDNN does not apply, beyond the reasons of both kernels, or ""."""
    for option in _ONLY_FLASH:
        if option in options:
            return f"it takes no {option.removeprefix('a ')}"
    if features > CUDNN_FEATURES:
        return f"heads of {features} are over {CUDNN_FEATURES}"
    if torch.are_deterministic_algorithms_enabled():
        return "its backward is not deterministic"
    if device_capability(device) < CUDNN_CAPABILITY:
        return "the GPU is older than Hopper"
    return "" if _has_cudnn() else "torch has no cuDNN here"


def _flash_refusal(device: torch.device, features: int) -> str:
    """Return why FlashAttention-2 does not apply, beyond the reasons of both kernels, or ""."""
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return "its backward is not deterministic under warn_only"
    major, minor = device_capability(device)
    # GPUs of capability 8.6, 8.9 and 12.x have 99 KB of shared memory; this backward needs more.
    if (major == 12 or (major == 8 and minor in (6, 9))) and 192 < features <= 224:
        return f"its backward takes no heads of {features} on compute capability {major}.{minor}"
    return ""


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: None,
    scale: float,
    mask: Mask,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [s_q, b, n, d], lse fp32 [b, n, s_q]); see `ops.attention.attention`.

    Args:
        dtype: of `out`, after rounding to the query's dtype; None is the query's dtype.
    """
    features, kernel = query.shape[-1], kernel_of(query, key, mask)
    query, key, value = (_padded(x) for x in (query, key, value))
    if kernel == CUDNN:
        heads_first = [x.permute(1, 2, 0, 3) for x in (query, key, value)]  # [b, n or g, s, d]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            *heads_first, None, True, 0.0, mask.causal, False, scale=scale
        )
        out = out.permute(2, 0, 1, 3)
        lse = lse.reshape(lse.shape[:3])  # cuDNN has [b, n, s_q, 1]
    else:
        band = _Band.of(mask, query.shape[0], key.shape[0])
        cu_seqlens, max_seqlens = _lengths(mask, query.shape[0], band.keys)
        keys, values = (x.narrow(0, 0, band.keys) for x in (key, value))
        rows = [_rows(x, mask) for x in (query, keys, values)]
        out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            *rows, *cu_seqlens, *max_seqlens, 0.0, band.is_causal, False, scale=scale, **band.window
        )
        out = _sequence_first(out, query)
        if mask.cu_seqlens is not None:  # [n, b s_q]
            lse = lse.unflatten(1, (query.shape[1], -1)).transpose(0, 1)
    return out.narrow(-1, 0, features).to(dtype or query.dtype).contiguous(), lse.contiguous()


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    mask: Mask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate attention given its output and log-sum-exp; see `reference`.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], the complete output.
        lse: fp32 [b, n, s_q], the complete log-sum-exp.
        scale: factor on the logits.
        mask: of the forward pass.

    Returns:
        (dq, dk, dv), shaped and typed like query, key and value.
    """
    features, kernel = query.shape[-1], kernel_of(query, key, mask)
    tensors = (grad_out.contiguous(), query, key, value, out)
    grad_out, query, key, value, out = (_padded(x) for x in tensors)
    queries, keys = query.shape[0], key.shape[0]
    if kernel == CUDNN:
        tensors = [x.permute(1, 2, 0, 3) for x in (grad_out, query, key, value, out)]
        # The kernel reads the random seed and offset only with dropout.
        unused_seed = torch.empty((), dtype=torch.int64, device=query.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            *tensors, lse.unsqueeze(-1).contiguous(), unused_seed, unused_seed, None, None, None,
            queries, keys, 0.0, mask.causal, scale=scale,
        )  # fmt: skip
        grads = (grad.permute(2, 0, 1, 3).narrow(-1, 0, features) for grad in grads)
        d_query, d_key, d_value = grads
        return d_query, d_key, d_value
    band = _Band.of(mask, queries, keys)
    cu_seqlens, max_seqlens = _lengths(mask, queries, band.keys)
    lengths = (queries, queries, band.keys, band.keys, queries)
    tensors = [
        _rows(x.narrow(0, 0, length), mask)
        for x, length in zip((grad_out, query, key, value, out), lengths, strict=True)
    ]
    if mask.cu_seqlens is not None:
        lse = lse.transpose(0, 1).flatten(1)  # [n, b s_q]
    unused_seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    d_query, *d_key_value = torch.ops.aten._flash_attention_backward.default(
        *tensors, lse.contiguous(), *cu_seqlens, *max_seqlens, 0.0, band.is_causal, unused_seed,
        unused_seed, scale=scale, **band.window,
    )  # fmt: skip
    grads = [_sequence_first(d_query, query)]
    for grad in d_key_value:
        grad = _sequence_first(grad, key)  # [visible keys, b, g, d]
        grads.append(F.pad(grad, (0, 0) * 3 + (0, keys - band.keys)) if band.keys < keys else grad)
    d_query, d_key, d_value = (grad.narrow(-1, 0, features) for grad in grads)
    return d_query, d_key, d_value


class _Band:
    """The band of visible keys around the diagonal, in FlashAttention-2's convention.

    FlashAttention-2 aligns the last query with the last key: query i of s_q attends to the keys j
    with j - (s_k - s_q) in [i - left, i + right].

    Args:
        keys: number of leading keys that are visible to any query.
        left, right: bounds of the band; None is unbounded.
    """

    def __init__(self, keys: int, left: int | None, right: int | None) -> None:
        self.keys = keys
        self.is_causal = right == 0
        self.window = {"window_size_left": left, "window_size_right": right}

    @staticmethod
    def of(mask: Mask, queries: int, keys: int) -> _Band:
        """Return the band of a mask; a causal mask excludes the keys after the last query."""
        end = mask.shift(queries, keys) + queries  # key index just after the last query
        if mask.causal:
            keys = min(keys, end)
        ahead = end - keys
        left = None if mask.window is None else mask.window - 1 - ahead
        return _Band(keys, left, ahead if mask.causal else None)


def _lengths(
    mask: Mask, queries: int, keys: int
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, int]]:
    """Return (cu_seqlens_q, cu_seqlens_k) and (max_seqlen_q, max_seqlen_k)."""
    if mask.cu_seqlens is None:
        return (None, None), (queries, keys)
    max_seqlen = queries if mask.max_seqlen is None else mask.max_seqlen
    return (mask.cu_seqlens, mask.cu_seqlens), (max_seqlen, max_seqlen)


def _rows(x: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Turn [s, b, n, d] into [b, s, n, d], a view, or with cu_seqlens into [b s, n, d]."""
    rows = x.transpose(0, 1)
    return rows if mask.cu_seqlens is None else rows.flatten(0, 1)


def _sequence_first(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `_rows` of a tensor with the batch of `like` [s, b, n, d]."""
    rows = x if x.ndim == 4 else x.unflatten(0, (like.shape[1], -1))
    return rows.transpose(0, 1)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., d] with a contiguous head dimension, zero-padded to a multiple of 8."""
    missing = -x.shape[-1] % FEATURES_MULTIPLE
    if missing:
        return F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _has_cudnn() -> bool:
    return torch.backends.cudnn.is_available()
