# SPDX-License-Identifier: Apache-2.0
"""The compile-only lane: every kernel compiled for GPUs without one, its code held to rules."""
