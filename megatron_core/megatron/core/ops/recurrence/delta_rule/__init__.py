# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: its engine in plain torch, and the kernels that SSD does not need."""
