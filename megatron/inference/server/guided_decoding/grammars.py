# SPDX-License-Identifier: Apache-2.0
"""Structured output: masks of the next tokens for JSON schemas, regular expressions, lists of
choices and Lark grammars. Only this module imports the library llguidance.

The HTTP process checks a grammar, under a time limit, before it sends the grammar to the engine.
The engine process compiles it in a separate thread and masks the logits before sampling.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from megatron.cli.tokenizers import ByteTable, HuggingFaceTokenizer, Tokenizer

#: Size of the cache of compiled grammars (least recently used are evicted).
MAX_CACHED_GRAMMARS = 64

#: White space between JSON tokens: at most one blank, so that a model cannot fill its answer with
#: white space.
WHITE_SPACE = r" ?"
_MAX_REASON_CHARS = 300


class BadGrammar(ValueError):
    """An invalid grammar; the text is one line for the user."""


def json_grammar(schema: Mapping[str, Any], *, whitespace: str | None = None) -> str:
    """Return the grammar of JSON that follows a schema.

    Args:
        schema: the JSON schema.
        whitespace: regular expression of white space between tokens; None for `WHITE_SPACE`.
    """
    return llguidance.LLMatcher.grammar_from_json_schema(
        dict(schema), overrides={"whitespace_pattern": whitespace or WHITE_SPACE}
    )


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that fully match a regular expression."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of a list of alternatives."""
    alternatives = " | ".join(json.dumps(choice) for choice in choices)
    return llguidance.LLMatcher.grammar_from_lark(f"start: {alternatives}")


def lark_grammar(text: str) -> str:
    """Return the grammar of a text in the Lark syntax of llguidance."""
    return llguidance.LLMatcher.grammar_from_lark(text)


class _Table:
    """The interface of llguidance to a tokenizer with a table of token bytes.

    Args:
        tokenizer: tokenizer of the model.
        stop_token: id of a stop token.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, stop_token: int) -> None:
        assert isinstance(tokenizer, ByteTable)
        self._tokenizer, self.eos_token_id = tokenizer, stop_token
        table = tokenizer.token_bytes()
        self.special_token_ids = [
            token for token, token_bytes in enumerate(table) if token_bytes is None
        ]
        self.tokens = [
            f"<special {token}>".encode() if token_bytes is None else token_bytes
            for token, token_bytes in enumerate(table)
        ]
        self._ids: dict[bytes, int] = {}
        for token, token_bytes in enumerate(table):
            if token_bytes:
                self._ids.setdefault(token_bytes, token)
        self._max_token_bytes = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Return the token ids of a part of a text.

        Tokenizers such as SentencePiece may add characters to the text. Then the text is tokenized
        greedily, with the longest token at each position.
        """
        with contextlib.suppress(UnicodeDecodeError):
            tokens = self._tokenizer.tokenize(text.decode(), add_special_tokens=False)
            if b"".join(self.tokens[token] for token in tokens) == text:
                return tokens
        ids: list[int] = []
        position = 0
        while position < len(text):
            ends = range(min(position + self._max_token_bytes, len(text)), position, -1)
            end = next((end for end in ends if text[position:end] in self._ids), None)
            if end is None:  # no token matches here
                break
            ids.append(self._ids[text[position:end]])
            position = end
        return ids


class Grammars:
    """A cache of compiled grammars over the tokens of one model.

    Args:
        tokenizer: tokenizer of the model.
        stop_tokens: ids of stop tokens, which a grammar allows where a text may end.
        vocab_size: vocabulary size of the model, not below the size of the tokenizer.

    Raises:
        BadGrammar: the tokenizer has no table of token bytes, or there is no stop token.
    """

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int], vocab_size: int) -> None:
        if not stop_tokens:
            raise BadGrammar("structured output needs a stop token, which the model does not have")
        tokenizer_source: Any
        if isinstance(tokenizer, HuggingFaceTokenizer):
            tokenizer_source = tokenizer.to_json()
        elif isinstance(tokenizer, ByteTable):
            tokenizer_source = llguidance.TokenizerWrapper(_Table(tokenizer, stop_tokens[0]))
        else:
            raise BadGrammar("structured output needs a text tokenizer")
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_source, n_vocab=vocab_size, eos_token=list(stop_tokens)
        )
        self._vocab_size = vocab_size
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # guards the cache; not held while a grammar compiles

    def compile(self, grammar: str) -> llguidance.LLMatcher:
        """Return the cached matcher of a grammar in its start state; copy it before advancing.

        Raises:
            BadGrammar: the grammar is invalid or too large.
        """
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split("\n<state>")[0].split())
            printable = "".join(c if c.isprintable() else " " for c in reason)
            raise BadGrammar(printable[:_MAX_REASON_CHARS])
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def mask(self, grammar: str) -> TokenMask:
        """Return a new mask of one output with this grammar. Raises BadGrammar."""
        return TokenMask(self.compile(grammar).deep_copy(), self._vocab_size)

    def reasoning_limit(self, mask: TokenMask | None, **limit: Any) -> ReasoningLimit:
        """Return the reasoning limit of one output; arguments as for `ReasoningLimit`."""
        return ReasoningLimit(mask, self._tokenizer.decode_bytes, self._vocab_size, **limit)


def grammars_of(
    tokenizer: Tokenizer, stop_tokens: Sequence[int], vocab_size: int
) -> Grammars | None:
    """Return the grammars of a model; None if its tokenizer does not support them."""
    try:
        return Grammars(tokenizer, stop_tokens, vocab_size)
    except BadGrammar:
        return None


class TokenMask:
    """The mask of the next token after the tokens so far: `EngineRequest.mask` of one output.

    It caches the matcher state of the last call, as most calls append one token.

    Args:
        matcher: matcher in its start state.
        vocab_size: vocabulary size of the model.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._consumed: list[int] = []

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of the text that the grammar forces next.

        It is the canonical tokenization of the text; the mask may also allow others.
        """
        self._follow(tokens)
        return [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Return the mask, bool [V]; all False if `tokens` violate the grammar."""
        self._follow(tokens)
        if self._matcher.is_error():
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def _follow(self, tokens: Sequence[int]) -> None:
        """Advance or roll back the matcher to the state after `tokens`."""
        num_consumed = len(self._consumed)
        if self._consumed != list(tokens[:num_consumed]):
            pairs = enumerate(zip(self._consumed, tokens, strict=False))
            num_common = next((n for n, (a, b) in pairs if a != b), min(num_consumed, len(tokens)))
            self._matcher.rollback(num_consumed - num_common)
            del self._consumed[num_common:]
        new = list(tokens[len(self._consumed) :])
        self._matcher.consume_tokens(new)
        self._consumed += new


class ReasoningLimit:
    """A mask that forces the end of reasoning at its limit, and otherwise applies another mask.

    Args:
        mask: mask of the answer; None allows all tokens.
        decode: converts token ids to bytes, including the texts of special tokens.
        vocab_size: vocabulary size of the model.
        begin: start mark of reasoning; "" if the prompt ends inside reasoning.
        end: end mark of reasoning.
        end_tokens: token ids of `end`.
        after: number of tokens after which `end` is forced; up to three more if they end within a
            character.
    """

    def __init__(
        self,
        mask: TokenMask | None,
        decode: Callable[[list[int]], bytes],
        vocab_size: int,
        *,
        begin: str,
        end: str,
        end_tokens: Sequence[int],
        after: int,
    ) -> None:
        self._mask, self._decode, self._vocab_size = mask, decode, vocab_size
        self._begin, self._end, self._after = begin.encode(), end.encode(), after
        self._end_tokens = list(end_tokens)
        self._head: list[int] = []  # tokens of the cached `_text`
        self._text = b""

    def __call__(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the mask, bool [V]; None allows all tokens."""
        closing = self._closing(tokens)
        if not closing:
            return None if self._mask is None else self._mask(tokens)
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[closing[0]] = True
        return allowed

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the forced tokens, see `TokenMask.forced`."""
        closing = self._closing(tokens)
        return closing if closing or self._mask is None else self._mask.forced(tokens)

    def _closing(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that end the reasoning; empty before its limit or after its end."""
        beyond = len(tokens) - self._after
        if beyond < 0:
            return []
        # At most three tokens of a split character and the end mark can be beyond the limit.
        head = list(tokens[: self._after + 3 + len(self._end_tokens)])
        if head != self._head:  # constant after the end of the reasoning
            self._head, self._text = head, self._decode(head)
        text = self._text
        if self._end in text or not text.lstrip().startswith(self._begin):
            return []
        for written in range(min(beyond, len(self._end_tokens) - 1), 0, -1):
            if list(tokens[-written:]) == self._end_tokens[:written]:
                return self._end_tokens[written:]
        return [] if _within_character(text) else self._end_tokens


def _within_character(text: bytes) -> bool:
    """Return whether bytes of UTF-8 end within a character."""
    for back, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:  # the first byte of a character encodes its length
            return back < 2 + (byte >= 0xE0) + (byte >= 0xF0)
        if byte < 0x80:
            return False
    return False
