# SPDX-License-Identifier: Apache-2.0
"""Training: entry scripts, options, data preparation, the training loop and its logs."""
