# SPDX-License-Identifier: Apache-2.0
"""The APIs of the server, one file each: handlers of requests."""
