# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: routes of OpenAI in one process, the engine in another."""
