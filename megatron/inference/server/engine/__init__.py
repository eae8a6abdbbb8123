# SPDX-License-Identifier: Apache-2.0
"""The engine process, its client in the HTTP process, and the link between them."""
