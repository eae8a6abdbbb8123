# SPDX-License-Identifier: Apache-2.0
"""The text of what follows a prompt, decoded as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.cli.tokenizers import Tokenizer

# Tokens of a prompt that the text of what follows can depend on.
_CONTEXT_TOKENS = 16


def continuation(tokenizer: Tokenizer, prompt: Sequence[int]) -> Callable[[Sequence[int]], str]:
    """Return the function from the ids that follow a prompt to the text that follows it.

    Alone, a text's first token may lose what stands before it: SentencePiece drops the blank that
    begins a word at the beginning of a text.

    Args:
        tokenizer: turns ids into text.
        prompt: ids that come first.
    """
    prompt = prompt[-_CONTEXT_TOKENS:]
    before = tokenizer.detokenize(prompt)

    def detokenize(ids: Sequence[int]) -> str:
        whole = tokenizer.detokenize([*prompt, *ids])
        return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(ids)

    return detokenize
