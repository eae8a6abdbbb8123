# SPDX-License-Identifier: Apache-2.0
"""The projection to the vocabulary fused with its loss: gradients while a chunk is there."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype, matmul_dtype
from megatron.core.ops.wide_product import add_product_

# Bytes of one chunk of fp32 logits: small against the model, large enough for the matmul and for
# the weight gradient, which is read and written once a chunk. A GPU wants thousands of rows in a
# product: with t of them, going over a fp32 gradient once each way takes 210 / t of what the three
# products take at an H200's bandwidth and 750 TFLOP/s in bf16, a quarter at 800 rows and 6 % at
# 3,500, which is what these bytes give at 152,000 words (half of them where logits are bf16).
CHUNK_BYTES, GPU_CHUNK_BYTES = 16 << 20, 2 << 30


class LinearCrossEntropy(torch.autograd.Function):
    """loss = sum over tokens of weight * (lse(hidden W^T) - logit of the target).

    Forward: as above, and at once, while a chunk of logits is there, dgrad: dlogits W, and wgrad:
    dlogits^T hidden. Saves those two gradients; backward multiplies them by the incoming one.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, weights, chunk_tokens, valid_columns, gradient_):
        wide = accumulation_dtype(hidden.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        fast = matmul_dtype(hidden)
        matrix = weight.to(fast)
        nll = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        if needs_weight:
            make = torch.empty if len(hidden) else torch.zeros
            grad_weight = make(weight.shape, dtype=wide, device=weight.device)
        size = min(chunk_tokens, hidden.shape[0])
        buffer = torch.empty((size, weight.shape[0]), dtype=fast, device=hidden.device)
        for first in range(0, hidden.shape[0], chunk_tokens):
            part = slice(first, first + chunk_tokens)
            rows = hidden[part].to(fast)
            logits = torch.mm(rows, matrix.t(), out=buffer[: rows.shape[0]])  # [c, v]
            needs = needs_hidden or needs_weight
            nll[part], factor = gradient_(logits, targets[part], valid_columns, gradient=needs)
            if not needs:
                continue
            factor = factor.mul_(weights[part])[:, None]
            if needs_hidden:
                grad_hidden[part] = torch.mm(logits, matrix).mul_(factor)
            scaled = (rows * factor).to(fast)
            if needs_weight:
                add_product_(grad_weight, logits.t(), scaled, overwrite=first == 0)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.hidden_dtype, ctx.weight_dtype = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nll)
        return torch.dot(nll, weights.to(wide)), nll

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        # Reading the value costs a synchronisation on a GPU, and saves two passes on a CPU.
        if grad_loss.device.type != "cpu" or grad_loss.item() != 1:
            grad_hidden = None if grad_hidden is None else grad_hidden * grad_loss
            grad_weight = None if grad_weight is None else grad_weight * grad_loss
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None
