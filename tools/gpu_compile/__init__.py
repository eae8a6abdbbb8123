# SPDX-License-Identifier: Apache-2.0
"""The compile-only check: every kernel is compiled for GPUs without a GPU, and its code checked."""
