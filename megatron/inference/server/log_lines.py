# SPDX-License-Identifier: Apache-2.0
"""Log lines of the HTTP process, as text or as JSON, with the id of the request they are about."""

from __future__ import annotations

import datetime
import json
import logging
from contextvars import ContextVar
from typing import Literal

LogFormat = Literal["text", "json"]

#: Of the request that is answered, for all that is logged meanwhile; "" outside of one.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

LOG = logging.getLogger("megatron.inference.server")


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request_id; of an answer also method,
    path, status and seconds; of an exception its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        found = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get() or None,
            **record.__dict__.get("answer", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in found.items() if value is not None})


def log_answer(method: str, path: str, *, status: int, seconds: float) -> None:
    """Log an answered request; the key is in none of these."""
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
    """Have everything logged to stderr in this format, with or without a line of each answer."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines()
        if form == "json"
        else logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    )
    logging.basicConfig(handlers=[handler])
    LOG.setLevel(logging.INFO if answers else logging.WARNING)
