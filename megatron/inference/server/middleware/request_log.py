# SPDX-License-Identifier: Apache-2.0
"""Log lines of the HTTP process, as text or JSON, with the request id."""

from __future__ import annotations

import datetime
import json
import logging
from contextvars import ContextVar
from typing import Literal

LogFormat = Literal["text", "json"]

#: Id of the request in progress, for its log lines; "" outside of a request.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

LOG = logging.getLogger("megatron.inference.server")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request_id; for an answer also
    method, path, status and seconds; for an exception its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get() or None,
            **record.__dict__.get("answer", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def log_answer(method: str, path: str, *, status: int, seconds: float) -> None:
    """Log an answered request. No argument contains the API key."""
    answer = {"method": method, "path": path, "status": status, "seconds": round(seconds, 6)}
    LOG.info(
        "request %s: %s %r answered %d in %.3f s",
        REQUEST_ID.get(),
        method,
        path,
        status,
        seconds,
        extra={"answer": answer},
    )


def set_up(form: LogFormat, *, answers: bool) -> None:
    """Configure logging to stderr in this format, with or without a line per answer."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if form == "json"
        else logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    )
    logging.basicConfig(handlers=[handler])
    LOG.setLevel(logging.INFO if answers else logging.WARNING)
