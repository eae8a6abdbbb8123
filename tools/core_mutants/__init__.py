# SPDX-License-Identifier: Apache-2.0
"""Random mutants over all of megatron.core, and the share that its tests kill."""
