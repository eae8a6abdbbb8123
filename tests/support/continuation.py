# SPDX-License-Identifier: Apache-2.0
"""The text of the tokens that follow a prompt, decoded together with the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.cli.tokenizers import Tokenizer

# The last tokens of a prompt, on which the text of the following tokens can depend.
_CONTEXT_TOKENS = 16


def continuation(tokenizer: Tokenizer, prompt: Sequence[int]) -> Callable[[Sequence[int]], str]:
    """Return the function from the ids that follow a prompt to the text that follows it.

    Decoded alone, the first token may lose its leading blank: SentencePiece drops the blank of a
    word at the beginning of a text.

    Args:
        tokenizer: turns ids into text.
        prompt: token ids of the prompt.
    """
    prompt = prompt[-_CONTEXT_TOKENS:]
    before = tokenizer.detokenize(prompt)

    def detokenize(ids: Sequence[int]) -> str:
        whole = tokenizer.detokenize([*prompt, *ids])
        return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(ids)

    return detokenize
