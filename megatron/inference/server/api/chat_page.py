# SPDX-License-Identifier: Apache-2.0
"""The chat page: one file, whose content security policy allows only its own style and script."""

from __future__ import annotations

import base64
import functools
import hashlib
import pkgutil
import re
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from megatron.inference.server.serving import Route


def content_policy(page: str) -> str:
    """Return the content security policy of a page: its own style and script, by digest, and
    requests to its own server."""

    def digests(tag: str) -> str:
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(p.encode()).digest()).decode() for p in contents]
        return " ".join(f"'sha256-{digest}'" for digest in hashes)

    rules = {
        "default-src": "'none'",
        "script-src": digests("script"),
        "style-src": digests("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@functools.cache
def _page() -> tuple[str, str]:
    """Return the page and its policy."""
    data = pkgutil.get_data("megatron.inference.server.api", "chat_page.html")
    assert data is not None
    text = data.decode()
    return text, content_policy(text)


async def chat_page(server: object, request: Request) -> Response:
    """Answer `GET /`."""
    text, policy = _page()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(text, headers=headers)


ROUTES: Sequence[Route] = (("GET", "/", chat_page, None),)
