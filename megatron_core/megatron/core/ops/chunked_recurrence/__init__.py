# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences in Triton, chunk by chunk: the kernels of the gated delta rule and of SSD.

SSD is the delta rule whose tokens are not corrected by what the state holds already: T is the
identity and the terms in K S are not there. So both have the same kernels, with `CORRECTS`.

Per chunk of C tokens and head of values, with a_i the decays summed up to token i,
D_ij = exp(a_i - a_j) for i >= j else 0, growth = exp(a), left = exp(a_C - a), and
T = (I + tril(beta K Kᵀ, -1))⁻¹. Decays of a path from token to token multiply to D, so that T ∘ D
is the inverse of I + tril(beta (K Kᵀ) ∘ D, -1), and T alone is never needed:

    u = beta (V - growth (K S))          change = (T ∘ D) u                   SSD: change = dt V
    O = scale ((Q Kᵀ) ∘ D) change + scale growth (Q S)
    S_next = exp(a_C) S + Kᵀ (left change)

No factor of a decay is above 1: a decay is only ever a difference of sums that is at most 0. Sums
are made in fp64 and kept in two parts of fp32 (see `ops.recurrence`), whose differences are exact
where they matter. Forward is two kernels: one, parallel over chunks and heads, makes T ∘ D, the
sums, and for the second scale (Q Kᵀ) ∘ D, which would else be on the way from chunk to chunk (SSD,
without T, leaves it there unless keys are tall or wide); the second sweeps the states through the
chunks, in fp32, parallel over sequences, heads and columns of values.

Backward, with dS the gradient of the state behind a chunk and dO that of the output:

    pulled = scale ((Q Kᵀ) ∘ D)ᵀ dO + left (K dS)
    x = (T ∘ D)ᵀ pulled                                                       SSD: x = pulled
    dS_before = exp(a_C) dS + Qᵀ (scale growth dO) - Kᵀ (growth beta x)       SSD: no last term
    Z = scale (dO changeᵀ) ∘ D           N = tril((x changeᵀ) ∘ D, -1)        SSD: N = 0
    dQ = scale growth (dO Sᵀ) + Z K      f = growth (x Sᵀ) + N K              SSD: f = 0
    dK = left (change dSᵀ) + Zᵀ Q - (beta N)ᵀ K - beta f
    dV = beta x                          dbeta = x · V - f · K

It sweeps again for the states before the chunks, and makes scale (Q Kᵀ) ∘ D again, of all chunks at
once, where forward did. Then it sweeps backwards for dS and x; then one kernel, parallel over
chunks and groups, makes the gradients. Nothing but the inputs, T ∘ D and the sums is kept between
forward and backward. A state is an affine function of the one before, so that a sweep
from the identity without values is the M of `ops.recurrence`.
"""
