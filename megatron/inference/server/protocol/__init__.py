# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests and the answers, as clients write and read them, one file per API."""
