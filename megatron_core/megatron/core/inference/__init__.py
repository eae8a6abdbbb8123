# SPDX-License-Identifier: Apache-2.0
"""Text generation on a trained model: sampling, key/value cache, decode loop; no HTTP, no files."""
