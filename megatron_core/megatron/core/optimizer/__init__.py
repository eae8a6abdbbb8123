# SPDX-License-Identifier: Apache-2.0
"""Optimizers over flat shards, clipping, the loss scaler and the learning-rate schedule."""
