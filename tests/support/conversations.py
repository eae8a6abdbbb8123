# SPDX-License-Identifier: Apache-2.0
"""One conversation in one call."""

from __future__ import annotations

from megatron.training.data.chat import (
    ChatTemplate,
    MalformedConversation,
    Tokenizer,
    encode_conversations,
)


def encode_conversation(
    messages: object, tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[int]]:
    """Turn a conversation into token ids and a loss mask.

    Args:
        messages: list of objects with `role` and `content`, both texts.
        tokenizer: of the model.
        template: how the turns are written.

    Returns:
        (ids, mask): mask is 1 on what the assistant says, the token that ends it included.

    Raises:
        MalformedConversation: this conversation is none, or the template refuses it.
        ValueError: the template is not prefix-stable; no conversation of that kind can be masked.
    """
    (encoded,) = encode_conversations([messages], tokenizer, template)
    if isinstance(encoded, MalformedConversation):
        raise encoded
    return encoded
