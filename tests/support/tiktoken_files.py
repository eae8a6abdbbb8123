# SPDX-License-Identifier: Apache-2.0
"""Small vocabularies of tiktoken, in both kinds of files that publish them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

#: All bytes, and what some of them merge to.
TOKENS: tuple[bytes, ...] = (
    *(bytes([number]) for number in range(256)),
    *(b"th", b"he", b"the", b" t", b" th", b" the", b"in", b"ing", b"er", b"an", b"and", b" a"),
    *(b" an", b" and", b"12", b"123", b"'s", b"ow", b"Br", b"Brow", b"lo", b"low", b"\n\n", b"  "),
    *("é".encode(), "日".encode(), b"</", b"</s", b"</s>", b"AA", b"AAAA", b"nB"),
)
#: What the patterns cut differently: digits, contractions, case, blanks; and what spells a token.
TEXTS = (
    "the lower and the BrownBROWN fox's 1234567 things",
    "  two\n\n\n  blanks \r\n and/\n a slash ",
    "日本語 é 🙂 I'LL don't",
    "a </s> in a text <SPECIAL_9>",
    "",
)


def write_ranks(path: Path, tokens: tuple[bytes, ...] = TOKENS) -> Path:
    """Write ranks by line, as OpenAI and Llama 3 publish them."""
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    path.write_text("".join(lines))
    return path


def write_vocabulary(path: Path, tokens: tuple[bytes, ...] = TOKENS) -> Path:
    """Write a vocabulary JSON, as Megatron reads it."""
    entries = [
        {
            "rank": i,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for i, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return path
