# SPDX-License-Identifier: Apache-2.0
"""A Llama-style tokenizer: SentencePiece tokens with byte fallback, and BOS before every text.

Only the libraries `tokenizers` and `transformers` write it, so it is an independent reference for
this package's tokenizers.
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
        folder: output folder; created if absent.
        template: post-processor template with `<s>`, `</s>` and the text `$A`; None for none.
        chat_template: chat template of tokenizer_config.json.
    """
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    vocabulary += [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a"), ("o", "f"), ("i", "n")]
    vocabulary += [left + right for left, right in merges]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(vocabulary)}, merges, unk_token="<unk>",
            byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    tokenizer.add_special_tokens(vocabulary[:3])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    if template is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=f"{template} $B", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "chat_template": chat_template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    with contextlib.redirect_stderr(io.StringIO()):
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
