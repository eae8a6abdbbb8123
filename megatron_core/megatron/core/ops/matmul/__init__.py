# SPDX-License-Identifier: Apache-2.0
"""Matrix products with a weight on a CPU: packed, few rows, low-bit copies, tiles of rows."""
