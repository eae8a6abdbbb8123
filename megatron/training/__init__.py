# SPDX-License-Identifier: Apache-2.0
"""Entry scripts of training, and what they are made of: options, data preparation, the loop, logs."""
