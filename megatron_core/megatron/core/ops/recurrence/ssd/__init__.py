# SPDX-License-Identifier: Apache-2.0
"""State-space duality (SSD): its engine in plain torch, and the kernels that it alone needs."""
