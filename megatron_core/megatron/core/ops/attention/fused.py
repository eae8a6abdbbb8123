# SPDX-License-Identifier: Apache-2.0
"""Attention by the fused CUDA kernels that come with torch: cuDNN's, or FlashAttention-2.

Both return the log-sum-exp and take the complete one in backward. They compute attention over whole
rows, causal or not; `problem` says where they do not apply. Their backward adds to the queries'
gradients in any order, so runs that ask for deterministic algorithms do not take them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from megatron.core.ops.attention.reference import Mask

#: cuDNN's kernels are the faster ones from Hopper on, for heads up to this size.
CUDNN_CAPABILITY, CUDNN_FEATURES = (9, 0), 128
#: FlashAttention-2 needs Ampere, and heads up to this size.
FLASH_CAPABILITY, FLASH_FEATURES = (8, 0), 256


def problem(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Mask,
    *,
    sinks: torch.Tensor | None,
    dropout: object | None,
) -> str:
    """Return why the fused kernels do not compute this attention, "" if they do.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        mask: which keys a query sees.
        sinks, dropout: of the call.
    """
    options = {
        "a window": mask.window,
        "documents": mask.document_ids,
        "sinks": sinks,
        "attention dropout": dropout,
    }
    reason = unsupported(
        query.device,
        query.dtype,
        query.shape[-1],
        options=[name for name, value in options.items() if value is not None],
    )
    if reason:
        return reason
    queries, keys = query.shape[0], key.shape[0]
    together = mask.query_start is None or mask.query_start == mask.key_start
    if mask.causal and not (queries == keys and together):
        return f"{queries} queries stand among {keys} keys"
    return "" if query.numel() and key.numel() else "there are no queries or no keys"


def unsupported(
    device: torch.device, dtype: torch.dtype, features: int, *, options: Sequence[str]
) -> str:
    """Return why the fused kernels cannot run attention of whole rows, "" if they can.

    Args:
        device: of the tensors.
        dtype: of query, key and value.
        features: d.
        options: what the attention has besides a causal mask, by its name in a sentence.
    """
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they have no {str(dtype).removeprefix('torch.')}"
    if options:
        return f"they have no {options[0].removeprefix('a ')}"
    if features % 8 or features > FLASH_FEATURES:
        return f"heads of {features} are no multiple of 8 up to {FLASH_FEATURES}"
    if torch.are_deterministic_algorithms_enabled():
        return "their backward is not deterministic"
    return "" if _capability(device) >= FLASH_CAPABILITY else "the GPU is older than Ampere"


def kernel_name(device: torch.device, features: int) -> str:
    """Return which of the fused kernels attention of these heads takes."""
    cudnn = features <= CUDNN_FEATURES and _has_cudnn(device)
    return "cuDNN" if cudnn else "FlashAttention-2"


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: None,
    scale: float,
    mask: Mask,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [s_q, b, n, d], lse fp32 [b, n, s_q]); see `ops.attention.attention`."""
    heads_first = [_heads_first(x) for x in (query, key, value)]  # [b, n or g, s, d]
    if _takes_cudnn(query):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, mask.causal, False, scale=scale
        )
        lse = lse.reshape(lse.shape[:3])  # cuDNN has [b, n, s_q, 1]
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *heads_first, 0.0, mask.causal, False, scale=scale
        )
    return _sequence_first(out).contiguous(), lse.contiguous()


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
        mask: the rule of the forward pass.

    Returns:
        (dq, dk, dv), shaped and typed like query, key and value.
    """
    tensors = [_heads_first(x) for x in (grad_out.contiguous(), query, key, value, out)]
    # Without dropout the kernels read neither seed nor offset.
    unread = torch.empty((), dtype=torch.int64, device=query.device)
    sizes = (query.shape[0], key.shape[0])
    if _takes_cudnn(query):
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, lse.unsqueeze(-1), unread, unread, None, None, None, *sizes, 0.0, mask.causal,
            scale=scale,
        )  # fmt: skip
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *tensors, lse, None, None, *sizes, 0.0, mask.causal, unread, unread, scale=scale
        )
    return tuple(_sequence_first(grad) for grad in grads)


def _takes_cudnn(query: torch.Tensor) -> bool:
    """Say whether cuDNN's kernels are taken, the same in forward and backward."""
    return kernel_name(query.device, query.shape[-1]) == "cuDNN"


@functools.cache
def _has_cudnn(device: torch.device) -> bool:
    return torch.backends.cudnn.is_available() and _capability(device) >= CUDNN_CAPABILITY


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """View [s, b, n, d] as [b, n, s, d], with the features of a head one after the other."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.permute(1, 2, 0, 3)


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    """View [b, n, s, d] as [s, b, n, d]."""
    return x.permute(2, 0, 1, 3)
