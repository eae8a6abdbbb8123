# SPDX-License-Identifier: Apache-2.0
"""Text, bytes and character offsets of single tokens, for log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from megatron.cli.tokenizers import Tokenizer
from megatron.core.inference.text_stream import REPLACEMENT, TextStream
from megatron.inference.server.output_processor import TokenScore


def token_text(tokenizer: Tokenizer, token: int, *, mark: str = "") -> str:
    """Return the text of one token within a text.

    Args:
        tokenizer: tokenizer of the model.
        token: token id; a token without text is shown by its name, or as `token_id:ID`.
        mark: prefix of a token with incomplete characters, whose bytes are shown as `\\xe6`.
    """
    raw = tokenizer.bytes_of(token)
    if raw is None:
        return tokenizer.detokenize([token]) or tokenizer.name_of(token) or f"token_id:{token}"
    try:
        return raw.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)


def decode_with_special_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of token ids, with the names of special tokens in it."""
    texts: list[str] = []
    start = 0
    for index, token in enumerate(tokens):
        if tokenizer.bytes_of(token) is None and not tokenizer.detokenize([token]):
            texts += [tokenizer.detokenize(tokens[start:index]), tokenizer.name_of(token) or ""]
            start = index + 1
    return "".join([*texts, tokenizer.detokenize(tokens[start:])])


def prompt_logprobs(
    tokenizer: Tokenizer, scores: Sequence[TokenScore], num_top: int
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt in vLLM's format, None for its first token.

    Args:
        tokenizer: tokenizer of the model.
        scores: score of each prompt token.
        num_top: alternatives per token.
    """
    entries: list[dict[str, Any] | None] = []
    for score in scores:
        if score.logprob is None:
            entries.append(None)
            continue
        ranks = {score.id: score.rank}
        ranks |= {token: rank for rank, (token, _) in enumerate(score.top, 1)}
        logprobs = {score.id: score.logprob, **dict(score.top[:num_top])}
        entries.append(
            {
                str(token): {
                    "logprob": logprob,
                    "rank": ranks[token],
                    "decoded_token": token_text(tokenizer, token),
                }
                for token, logprob in logprobs.items()
            }
        )
    return entries


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """Return the UTF-8 bytes of a token: empty for a special token, None if unknown."""
    raw = tokenizer.bytes_of(token)
    if raw is None:
        text = tokenizer.detokenize([token])
        return None if REPLACEMENT in text else list(text.encode())
    return list(raw)


class TextOffsets:
    """Compute the character offset of each token in a text.

    A token that continues a character has the offset of that character. Invalid bytes count as in
    the decoded text: one replacement character for each, or one for all, as the tokenizer decodes.

    Args:
        tokenizer: tokenizer of the model.
        context: tokens before the first token.
        start: number of characters before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, start: int) -> None:
        self._tokenizer, self._stream = tokenizer, TextStream(tokenizer.detokenize, context)
        self._returned = start  # characters up to the end of the stream's text
        self._count = start  # complete characters and final replacements
        self._partial, self._partial_tokens = b"", list[int]()  # of an incomplete character
        self._unsettled = False  # whether the stream holds back characters

    def add(self, token: int) -> tuple[int, str]:
        """Return the offset of the next token, and the text that it completes."""
        raw = self._tokenizer.bytes_of(token) or b""
        continues = bool(self._partial and raw) and _is_single_char(self._partial + raw[:1])
        if self._partial and raw and not continues:
            self._end_partial()
        offset = self._count
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._partial + raw)
        self._count += len(text)
        new_text = self._stream.push([token])
        self._returned += len(new_text)
        if raw:
            self._partial = decoder.getstate()[0]
            tokens = self._partial_tokens if continues and not text else []
            self._partial_tokens = [*tokens, token] if self._partial else []
            open_end = bool(self._partial) or text.endswith(REPLACEMENT)
            returns_all = bool(new_text) and not new_text.endswith(REPLACEMENT)
            self._unsettled = open_end or (self._unsettled and not returns_all)
        if not self._unsettled:
            self._count = self._returned
            if text and new_text.endswith(text):  # exact, whatever precedes the token
                offset = self._returned - len(text)
        return offset, new_text

    def _end_partial(self) -> None:
        """Count the bytes of a character that stays incomplete."""
        first_bytes = self._tokenizer.bytes_of(self._partial_tokens[0]) or b""
        text = self._tokenizer.detokenize(self._partial_tokens)
        self._count += len(text) if len(first_bytes) == 1 else 1
        self._partial, self._partial_tokens = b"", []


def _is_single_char(partial: bytes) -> bool:
    """Return whether bytes are one character, or the start of one."""
    return len(partial.decode(errors="replace")) == 1
