# SPDX-License-Identifier: Apache-2.0
"""Errors of the API, in the format of OpenAI or Anthropic.

Their messages never contain the text of an internal exception.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

#: Path prefix of the routes whose errors have the format of Anthropic.
ANTHROPIC_ROUTES = "/v1/messages"


class ApiError(Exception):
    """An error answer.

    Args:
        status: HTTP status.
        message: message for the user; one line.
        param: field of the request that caused the error; None for no single field.
        code: machine-readable code.
        retry_seconds: seconds until the client may retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_seconds = retry_seconds

    def to_json(self, request_id: str, path: str = "") -> dict[str, Any]:
        """Return the body of the answer, in the format of the route at `path`."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        if path.startswith(ANTHROPIC_ROUTES):
            kinds |= {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
            default_kind = "api_error" if self.status >= 500 else "invalid_request_error"
            error = {"type": kinds.get(self.status, default_kind), "message": self.message}
            return {"type": "error", "error": error, "request_id": request_id}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": kinds.get(self.status, kind),
                "param": self.param,
                "code": self.code,
                "request_id": request_id,
            }
        }

    def response(self, request_id: str, path: str = "") -> Response:
        """Return the answer, in the format of the route at `path`."""
        headers = {}
        if self.retry_seconds is not None:
            headers["retry-after"] = str(self.retry_seconds)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.to_json(request_id, path), self.status, headers=headers)


def internal_error() -> ApiError:
    """Return the answer to a request that raised an exception; the log has its traceback."""
    return ApiError(500, "internal error: see the server's log under this request id")
