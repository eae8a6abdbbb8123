# SPDX-License-Identifier: Apache-2.0
"""Entry scripts of training and their parts: options, data preparation, the loop, logs."""
