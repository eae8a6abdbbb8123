# SPDX-License-Identifier: Apache-2.0
"""Kill a small training run at random moments, many times, and see that nothing is lost."""
