# SPDX-License-Identifier: Apache-2.0
"""Chunked linear recurrences in Triton: the kernels of the gated delta rule and of SSD.

SSD is the delta rule without the delta: tokens do not subtract the state's prediction K S, and T is
the identity. So both use the same kernels, with the constant `DELTA_RULE`.

Per chunk of C tokens and head of values, with a_i the cumulative decay up to token i,
D_ij = exp(a_i - a_j) for i >= j else 0, and T = (I + tril(beta K Kᵀ, -1))⁻¹:

    delta = beta (V - exp(a) (K S))      v = (T ∘ D) delta                    SSD: v = dt V
    O = scale ((Q Kᵀ) ∘ D) v + scale exp(a) (Q S)
    S_next = exp(a_C) S + Kᵀ (exp(a_C - a) v)

The decays along a path of tokens multiply to the entry of D for its ends. So T ∘ D is the inverse
of I + tril(beta (K Kᵀ) ∘ D, -1), and T alone is never computed.

All exponents are differences of cumulative decays that are at most 0, so no factor exceeds 1. The
cumulative sums are computed in fp64 and stored as high and low parts in fp32 (`ops.recurrence`).
Forward runs two kernels. The first is parallel over chunks and heads: it computes T ∘ D, the
cumulative decays, and scale (Q Kᵀ) ∘ D, to shorten the sequential path of the sweep (SSD has no T;
its sweep computes the scores itself unless K is large or the values are fp32). The second sweeps
fp32 states through the chunks, parallel over sequences, heads and columns of values.

Backward, with dS the gradient of the state after a chunk and dO the gradient of the output:

    dv = scale ((Q Kᵀ) ∘ D)ᵀ dO + exp(a_C - a) (K dS)
    x = (T ∘ D)ᵀ dv                                                           SSD: x = dv
    dS_before = exp(a_C) dS + Qᵀ (scale exp(a) dO) - Kᵀ (exp(a) beta x)       SSD: no last term
    Z = scale (dO vᵀ) ∘ D                N = tril((x vᵀ) ∘ D, -1)             SSD: N = 0
    dQ = scale exp(a) (dO Sᵀ) + Z K      f = exp(a) (x Sᵀ) + N K              SSD: f = 0
    dK = exp(a_C - a) (v dSᵀ) + Zᵀ Q - (beta N)ᵀ K - beta f
    dV = beta x                          dbeta = x · V - f · K

Backward recomputes the states before the chunks with another sweep, and scale (Q Kᵀ) ∘ D of all
chunks where forward did. A reverse sweep then computes dS and x, and one kernel, parallel over
chunks and groups, the gradients of the inputs. Only the inputs, T ∘ D and the cumulative decays are
saved from forward to backward. A state is an affine function of the state before, so a sweep from
the identity without values returns the M of `ops.recurrence`.
"""
