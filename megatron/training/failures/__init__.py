# SPDX-License-Identifier: Apache-2.0
"""How a run ends early and what it does about ranks and steps that go wrong."""
