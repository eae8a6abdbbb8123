# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of Llama's form: pieces with bytes to fall back on, and BOS before every text.

It is written by the libraries `tokenizers` and `transformers` alone: what our own tokenizers leave
out of a text shows against it.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, processors

UNKNOWN, BOS, EOS = 0, 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def write_llama_tokenizer(
    folder: Path, *, template: str | None = "<s> $A", chat_template: str = TEMPLATE
) -> Any:
    """Write tokenizer.json and tokenizer_config.json, and return the tokenizer of transformers.

    Args:
        folder: where to; made if absent.
        template: of the post-processor, of `<s>`, `</s>` and the text `$A`; None for no such thing.
        chat_template: written beside it.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a"), ("o", "f"), ("i", "n")]
    pieces += [left + right for left, right in merges]
    made = tokenizers.Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>",
            byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    made.add_special_tokens(pieces[:3])
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    if template is not None:
        made.post_processor = processors.TemplateProcessing(
            single=template, pair=f"{template} $B", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    folder.mkdir(exist_ok=True, parents=True)
    made.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "chat_template": chat_template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    with contextlib.redirect_stderr(io.StringIO()):
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
