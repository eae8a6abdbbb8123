# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the prologue share: the sections of a unit, and the rows that taps meet.

A section is the query of a unit, its key, or so many columns of its values; the last section is its
gates. All tiles are as wide as a key. Strides of rows arrive divided by ALIGN, so that the compiler
knows how far loads are aligned: units are rarely a multiple of 16 bytes apart.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_column(
    section,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first column of a section in its unit."""
    key_or_value = tl.where(section == 1, KEY, VALUE + (section - 2) * BLOCK)
    return tl.where(section == 0, QUERY, key_or_value)


@triton.jit
def columns_inside(
    section,
    columns,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return which columns of a section there are; a constant where all are."""
    if KEYS == BLOCK and VALUES % BLOCK == 0:
        inside = columns < BLOCK
    else:
        inside = columns < tl.where(section < 2, KEYS, VALUES - (section - 2) * BLOCK)
    return inside


@triton.jit
def tap(taps_ptr, apart, inside, TAP: tl.constexpr, WIDTH: tl.constexpr):
    """Return the weights that meet the token TAP before, zero where there are none.

    Taps lie `apart` from each other, and the weights of one side by side.
    """
    columns = tl.arange(0, inside.shape[0])
    at = taps_ptr + (WIDTH - 1 - TAP) * apart + columns
    return tl.load(at, mask=inside & (TAP < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def place_of(places_ptr, token, inside, HAS_PLACES: tl.constexpr):
    """Return the rows of tokens."""
    place = token
    if HAS_PLACES:
        place = tl.load(places_ptr + token, mask=inside, other=0)
    return place


@triton.jit
def row_of(source_ptr, places_ptr, token, tokens, inside, stride, HAS_PLACES: tl.constexpr):
    """Return the columns of tokens [tokens, BLOCK], zero of those that are not among `tokens`."""
    wanted = (token >= 0) & (token < tokens)
    place = place_of(places_ptr, token, wanted, HAS_PLACES)
    columns = tl.arange(0, inside.shape[0])
    at = source_ptr + (place * stride)[:, None] + columns[None, :]
    return tl.load(at, mask=wanted[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def row_before(
    initial_ptr,
    number,
    back,
    wanted,
    inside,
    initial_stride,
    WIDTH: tl.constexpr,
):
    """Return the rows `back` before their sequences [tokens, BLOCK]."""
    columns = tl.arange(0, inside.shape[0])
    row = (number.to(tl.int64) * (WIDTH - 1) + (WIDTH - 1 - back)) * initial_stride
    at = initial_ptr + row[:, None] + columns[None, :]
    return tl.load(at, mask=wanted[:, None] & inside[None, :], other=0.0).to(tl.float32)
