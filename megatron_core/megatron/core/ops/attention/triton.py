# SPDX-License-Identifier: Apache-2.0
"""Flash attention in Triton (Dao, 2023) with log-sum-exp: launch and autograd of the kernels.

The three Triton kernels of attention: forward, query gradient, key and value gradient.

Every kernel recomputes logits tile by tile. Transposed operands are loaded transposed, never made
by transposing an accumulator: some Triton releases miscompile that on Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.attention.reference import Mask
from megatron.core.ops.launches import Launches

# ROWS: rows of gradient and output that a program multiplies at once.
ROW_DOTS = Launches("attention_row_dots", {"ROWS": 32, "num_warps": 4})


@triton.jit
def visible_pairs(
    positions,
    columns,
    mine,
    other,
    keys,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Say which (position, column) pairs see each other; all arguments broadcast."""
    # The first term is true; it gives the result the broadcast shape of both.
    visible = (positions > -(1 << 30)) & (columns < keys)
    if CAUSAL:
        visible = visible & (columns <= positions)
    if HAS_WINDOW:
        visible = visible & (positions - columns < window)
    if HAS_DOCUMENTS:
        visible = visible & (mine == other)
    return visible


@triton.jit(do_not_specialize=["shift"])
def attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    query_documents_ptr,
    documents_ptr,
    scale,
    shift,
    queries,
    keys,
    batch,
    heads,
    groups,
    features,
    q_stride_s,
    q_stride_b,
    q_stride_n,
    k_stride_s,
    k_stride_b,
    k_stride_g,
    v_stride_s,
    v_stride_b,
    v_stride_g,
    window,
    HAS_SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend BLOCK queries of one head to all keys they see, in one pass over the keys."""
    first = tl.program_id(0) * BLOCK
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    group = head // (heads // groups)
    rows = first + tl.arange(0, BLOCK)
    feature = tl.arange(0, FEATURES)
    row_mask = (rows < queries)[:, None] & (feature < features)[None, :]
    q = tl.load(
        q_ptr
        + sample * q_stride_b
        + head * q_stride_n
        + rows.to(tl.int64)[:, None] * q_stride_s
        + feature[None, :],
        mask=row_mask,
        other=0.0,
    )
    mine = 0
    if HAS_DOCUMENTS:
        place = query_documents_ptr + rows.to(tl.int64) * batch + sample
        mine = tl.load(place, mask=rows < queries, other=-1)[:, None]
    maximum = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_SINKS:  # the sink is a key seen first, whose value is zero
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        maximum = tl.zeros([BLOCK], dtype=tl.float32) + sink
        total += 1.0
    k_base = k_ptr + sample * k_stride_b + group * k_stride_g
    v_base = v_ptr + sample * v_stride_b + group * v_stride_g
    result = tl.zeros([BLOCK, FEATURES], dtype=tl.float32)
    low = 0
    high = keys
    if HAS_WINDOW:
        low = tl.maximum(first + shift - window + 1, 0) // BLOCK * BLOCK
    if CAUSAL:
        high = tl.minimum(first + BLOCK + shift, keys)
    for start in range(low, high, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        column_mask = columns < keys
        wide_columns = columns.to(tl.int64)
        kt_place = k_base + wide_columns[None, :] * k_stride_s + feature[:, None]
        across = (feature < features)[:, None] & column_mask[None, :]
        kt = tl.load(kt_place, mask=across, other=0.0)
        logits = tl.dot(q, kt, input_precision="ieee") * scale
        other = 0
        if HAS_DOCUMENTS:
            place = documents_ptr + columns.to(tl.int64) * batch + sample
            other = tl.load(place, mask=column_mask, other=-2)[None, :]
        seen = visible_pairs(
            (rows + shift)[:, None],
            columns[None, :],
            mine,
            other,
            keys,
            window,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
        )
        logits = tl.where(seen, logits, float("-inf"))
        larger = tl.maximum(maximum, tl.max(logits, 1))
        # A row that saw no key so far has -inf: shift by 0 there, so that no inf - inf arises.
        offset = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(logits - offset[:, None])
        decay = tl.exp(maximum - offset)
        total = total * decay + tl.sum(weights, 1)
        v_place = v_base + wide_columns[:, None] * v_stride_s + feature[None, :]
        along = column_mask[:, None] & (feature < features)[None, :]
        v = tl.load(v_place, mask=along, other=0.0)
        result = result * decay[:, None]
        result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = larger
    empty = total == 0.0  # a row that saw no key: output 0, lse -inf
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), maximum + tl.log(total))
    tl.store(lse_ptr + (sample * heads + head) * queries + rows, lse, mask=rows < queries)
    tl.store(
        out_ptr
        + ((rows.to(tl.int64)[:, None] * batch + sample) * heads + head) * features
        + feature[None, :],
        (result / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=row_mask,
    )


@triton.jit(do_not_specialize=["shift"])
def query_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_q_ptr,
    query_documents_ptr,
    documents_ptr,
    scale,
    shift,
    queries,
    keys,
    batch,
    heads,
    groups,
    features,
    q_stride_s,
    q_stride_b,
    q_stride_n,
    k_stride_s,
    k_stride_b,
    k_stride_g,
    v_stride_s,
    v_stride_b,
    v_stride_g,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make dq of BLOCK queries of one head: scale * ds k over the keys they see."""
    first = tl.program_id(0) * BLOCK
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    group = head // (heads // groups)
    rows = first + tl.arange(0, BLOCK)
    feature = tl.arange(0, FEATURES)
    row_mask = (rows < queries)[:, None] & (feature < features)[None, :]
    dense = ((rows.to(tl.int64)[:, None] * batch + sample) * heads + head) * features
    dense = dense + feature[None, :]
    q = tl.load(
        q_ptr
        + sample * q_stride_b
        + head * q_stride_n
        + rows.to(tl.int64)[:, None] * q_stride_s
        + feature[None, :],
        mask=row_mask,
        other=0.0,
    )
    grad_out = tl.load(grad_out_ptr + dense, mask=row_mask, other=0.0)
    row_place = (sample * heads + head) * queries + rows
    lse = tl.load(lse_ptr + row_place, mask=rows < queries, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # a row that saw no key
    delta = tl.load(delta_ptr + row_place, mask=rows < queries, other=0.0)
    mine = 0
    if HAS_DOCUMENTS:
        place = query_documents_ptr + rows.to(tl.int64) * batch + sample
        mine = tl.load(place, mask=rows < queries, other=-1)[:, None]
    grad = tl.zeros([BLOCK, FEATURES], dtype=tl.float32)
    low = 0
    high = keys
    if HAS_WINDOW:
        low = tl.maximum(first + shift - window + 1, 0) // BLOCK * BLOCK
    if CAUSAL:
        high = tl.minimum(first + BLOCK + shift, keys)
    for start in range(low, high, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        column_mask = columns < keys
        wide_columns = columns.to(tl.int64)
        k_base = k_ptr + sample * k_stride_b + group * k_stride_g
        v_base = v_ptr + sample * v_stride_b + group * v_stride_g
        across = (feature < features)[:, None] & column_mask[None, :]
        kt = tl.load(
            k_base + wide_columns[None, :] * k_stride_s + feature[:, None], mask=across, other=0.0
        )
        vt = tl.load(
            v_base + wide_columns[None, :] * v_stride_s + feature[:, None], mask=across, other=0.0
        )
        other = 0
        if HAS_DOCUMENTS:
            place = documents_ptr + wide_columns * batch + sample
            other = tl.load(place, mask=column_mask, other=-2)[None, :]
        seen = visible_pairs(
            (rows + shift)[:, None],
            columns[None, :],
            mine,
            other,
            keys,
            window,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
        )
        logits = tl.dot(q, kt, input_precision="ieee") * scale
        weights = tl.exp(tl.where(seen, logits - lse[:, None], float("-inf")))
        grad_weights = tl.dot(grad_out, vt, input_precision="ieee")
        grad_logits = weights * (grad_weights - delta[:, None])
        k = tl.load(
            k_base + wide_columns[:, None] * k_stride_s + feature[None, :],
            mask=column_mask[:, None] & (feature < features)[None, :],
            other=0.0,
        )
        grad += tl.dot(grad_logits.to(k.dtype), k, input_precision="ieee")
    tl.store(grad_q_ptr + dense, (grad * scale).to(grad_q_ptr.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=["shift"])
def key_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    query_documents_ptr,
    documents_ptr,
    scale,
    shift,
    queries,
    keys,
    batch,
    heads,
    groups,
    features,
    q_stride_s,
    q_stride_b,
    q_stride_n,
    k_stride_s,
    k_stride_b,
    k_stride_g,
    v_stride_s,
    v_stride_b,
    v_stride_g,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make dk and dv of BLOCK keys of one key head over all queries of all heads that share it.

    Logits are made transposed, [keys, queries], so that no accumulator is ever transposed; one
    program sums the whole group, so that no atomic addition is needed.
    """
    first = tl.program_id(0) * BLOCK
    sample = (tl.program_id(1) // groups).to(tl.int64)
    group = (tl.program_id(1) % groups).to(tl.int64)
    share = heads // groups
    columns = first + tl.arange(0, BLOCK)
    column_mask = columns < keys
    wide_columns = columns.to(tl.int64)
    feature = tl.arange(0, FEATURES)
    tile_mask = column_mask[:, None] & (feature < features)[None, :]
    k = tl.load(
        k_ptr
        + sample * k_stride_b
        + group * k_stride_g
        + wide_columns[:, None] * k_stride_s
        + feature[None, :],
        mask=tile_mask,
        other=0.0,
    )
    v = tl.load(
        v_ptr
        + sample * v_stride_b
        + group * v_stride_g
        + wide_columns[:, None] * v_stride_s
        + feature[None, :],
        mask=tile_mask,
        other=0.0,
    )
    other = 0
    if HAS_DOCUMENTS:
        place = documents_ptr + wide_columns * batch + sample
        other = tl.load(place, mask=column_mask, other=-2)[:, None]
    grad_k = tl.zeros([BLOCK, FEATURES], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK, FEATURES], dtype=tl.float32)
    low = 0
    high = queries
    if CAUSAL:
        low = tl.maximum(first - shift, 0) // BLOCK * BLOCK
    if HAS_WINDOW:
        high = tl.minimum(first + BLOCK - 1 + window - shift, queries)
    for index in range(share):
        head = group * share + index
        q_base = q_ptr + sample * q_stride_b + head * q_stride_n
        for start in range(low, high, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            row_mask = rows < queries
            wide_rows = rows.to(tl.int64)
            across = (feature < features)[:, None] & row_mask[None, :]
            along = row_mask[:, None] & (feature < features)[None, :]
            dense = ((wide_rows * batch + sample) * heads + head) * features
            qt = tl.load(
                q_base + wide_rows[None, :] * q_stride_s + feature[:, None], mask=across, other=0.0
            )
            row_place = (sample * heads + head) * queries + rows
            lse = tl.load(lse_ptr + row_place, mask=row_mask, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse)  # a row that saw no key
            delta = tl.load(delta_ptr + row_place, mask=row_mask, other=0.0)
            mine = 0
            if HAS_DOCUMENTS:
                place = query_documents_ptr + rows.to(tl.int64) * batch + sample
                mine = tl.load(place, mask=row_mask, other=-1)[None, :]
            seen = visible_pairs(
                (rows + shift)[None, :],
                columns[:, None],
                mine,
                other,
                keys,
                window,
                CAUSAL,
                HAS_WINDOW,
                HAS_DOCUMENTS,
            )
            seen = seen & row_mask[None, :]
            logits = tl.dot(k, qt, input_precision="ieee") * scale
            weights = tl.exp(tl.where(seen, logits - lse[None, :], float("-inf")))
            grad_out = tl.load(
                grad_out_ptr + dense[:, None] + feature[None, :], mask=along, other=0.0
            )
            grad_v += tl.dot(weights.to(grad_out.dtype), grad_out, input_precision="ieee")
            grad_out_t = tl.load(
                grad_out_ptr + dense[None, :] + feature[:, None], mask=across, other=0.0
            )
            grad_weights = tl.dot(v, grad_out_t, input_precision="ieee")
            grad_logits = weights * (grad_weights - delta[None, :])
            q = tl.load(
                q_base + wide_rows[:, None] * q_stride_s + feature[None, :], mask=along, other=0.0
            )
            grad_k += tl.dot(grad_logits.to(q.dtype), q, input_precision="ieee")
    place = ((wide_columns[:, None] * batch + sample) * groups + group) * features
    place = place + feature[None, :]
    tl.store(grad_k_ptr + place, (grad_k * scale).to(grad_k_ptr.dtype.element_ty), mask=tile_mask)
    tl.store(grad_v_ptr + place, grad_v.to(grad_v_ptr.dtype.element_ty), mask=tile_mask)


# Square tiles of 64 rows; up to 128 features they fit the registers of four warps forward and (but
# for 136 bytes of the key gradient's) of eight backward: see test_aot_kernels.py. Wider heads have
# fewer rows: at 256 features the key gradient's tiles of 64 take 321 KB of shared memory and do not
# launch, its tiles of 32 take 98 KB.
MAX_BLOCK, MIN_BLOCK = 64, 16
TILE_ELEMENTS = 64 * 128
FORWARD_WARPS = 4
BACKWARD_WARPS = 8


@triton.jit
def row_dots_kernel(
    grad_ptr,
    out_ptr,
    dots_ptr,
    queries,
    batch,
    heads,
    features,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum g out over the features of ROWS rows [s, b, n, d], into [b, n, s]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < queries.to(tl.int64) * batch * heads
    feature = tl.arange(0, FEATURES)
    places = rows[:, None] * features + feature[None, :]  # [ROWS, FEATURES]
    mask = inside[:, None] & (feature < features)[None, :]
    grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    query, head = rows // (batch * heads), rows % (batch * heads)
    tl.store(dots_ptr + head * queries + query, tl.sum(grad * out, axis=1), mask=inside)


def row_dots(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return rowsum(g out), fp32 [b, n, s_q], of two [s_q, b, n, d]; each is read once."""
    queries, batch, heads, features = out.shape
    dots = torch.empty((batch, heads, queries), dtype=torch.float32, device=out.device)
    constants = {"FEATURES": max(16, triton.next_power_of_2(features)), **ROW_DOTS.pick(out)}
    if dots.numel():
        row_dots_kernel[(triton.cdiv(dots.numel(), constants["ROWS"]),)](
            grad_out, out.contiguous(), dots, queries, batch, heads, features, **constants
        )
    return dots


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    mask: Mask,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [s_q, b, n, d], lse fp32 [b, n, s_q]); see `ops.attention.attention`.

    `dtype` is that of `out`; None is that of `query`.
    """
    query, key, value = (_dense_features(x) for x in (query, key, value))
    queries, batch, heads, _ = query.shape
    out = torch.empty(query.shape, dtype=dtype or query.dtype, device=query.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    constants = _constants(query, mask, FORWARD_WARPS)
    if out.numel():
        attention_forward_kernel[(triton.cdiv(queries, constants["BLOCK"]), batch * heads)](
            query,
            key,
            value,
            lse if sinks is None else sinks.contiguous(),
            out,
            lse,
            *_arguments(query, key, value, scale, mask),
            HAS_SINKS=sinks is not None,
            **constants,
        )
    return out, lse


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
    query, key, value = (_dense_features(x) for x in (query, key, value))
    grad_out, lse = grad_out.contiguous(), lse.contiguous()
    delta = row_dots(grad_out, out)  # [b, n, s_q]
    grad_query, grad_key, grad_value = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)
    )
    queries, batch, heads, _ = query.shape
    arguments = _arguments(query, key, value, scale, mask)
    constants = _constants(query, mask, BACKWARD_WARPS)
    block = constants["BLOCK"]
    inputs = (query, key, value, grad_out, lse, delta)
    if grad_query.numel():
        query_gradient_kernel[(triton.cdiv(queries, block), batch * heads)](
            *inputs, grad_query, *arguments, **constants
        )
    if grad_key.numel():
        key_gradient_kernel[(triton.cdiv(key.shape[0], block), batch * key.shape[2])](
            *inputs, grad_key, grad_value, *arguments, **constants
        )
    return grad_query, grad_key, grad_value


def _dense_features(x: torch.Tensor) -> torch.Tensor:
    """Return x with a dense last dimension; slices of a fused projection stay views."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: Mask
) -> tuple:
    """List the arguments that all three kernels share."""
    queries, keys = query.shape[0], key.shape[0]
    mine, others = mask.documents_of_queries(queries, keys), mask.document_ids
    return (
        query if mine is None else mine.int().contiguous(),
        key if others is None else others.int().contiguous(),
        scale,
        mask.shift(queries, keys),
        query.shape[0],
        key.shape[0],
        query.shape[1],
        query.shape[2],
        key.shape[2],
        query.shape[3],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        mask.window or 0,
    )


def _constants(query: torch.Tensor, mask: Mask, warps: int) -> dict[str, object]:
    """Name the compile-time constants that all three kernels share."""
    return {
        "CAUSAL": mask.causal,
        "HAS_WINDOW": mask.window is not None,
        "HAS_DOCUMENTS": mask.document_ids is not None,
        **tile_shape(query.shape[-1]),
        "num_warps": warps,
        "num_stages": 2,
    }


def tile_shape(features: int) -> dict[str, int]:
    """Return the features and rows of a tile of heads of so many features, as constants."""
    padded = max(16, triton.next_power_of_2(features))
    rows = min(MAX_BLOCK, max(MIN_BLOCK, TILE_ELEMENTS // padded))
    return {"FEATURES": padded, "BLOCK": rows}
