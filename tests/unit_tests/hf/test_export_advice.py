# SPDX-License-Identifier: Apache-2.0
"""A model that cannot be exported is refused with the flags that make it exportable."""

import pytest

from megatron.cli.launch import Launch
from megatron.hf.config_json import check_exportable
from megatron.training.config.model_table import gpt_config, model_options
from megatron.training.pretrain_gpt import read_run
from tests.support.arguments import last_wins

RUN = (
    "--mock-data --vocab-size 100 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters 1 "
    "--position-embedding-type rope "
)
LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear "


@pytest.mark.parametrize(
    ("extra_flags", "flags"),
    [
        ("", ()),
        ("--normalization RMSNorm", ()),
        (
            f"{LLAMA} --add-attention-output-bias --window-size 8",
            ("no --add-attention-output-bias",),
        ),
        (f"{LLAMA} --window-size 8", ()),
        (f"{LLAMA} --rotary-percent 0.5", ()),
        (
            f"{LLAMA} --position-embedding-type learned_absolute",
            ("--position-embedding-type rope", "--rotary-base 10000.0", "--rotary-percent 1.0"),
        ),
        (f"{LLAMA} --apply-layernorm-1p", ("no --apply-layernorm-1p",)),
        (LLAMA, ()),
    ],
)
def test_export_error_names_flags(extra_flags, flags):
    words = last_wins((RUN + extra_flags).split())
    config = gpt_config(read_run(words, Launch(world_size=1)).config, 100)
    if not flags:
        check_exportable(config, flags_of=model_options)
        return
    with pytest.raises(ValueError, match="train it with") as raised:
        check_exportable(config, flags_of=model_options)
    advice = str(raised.value).partition("train it with ")[2]
    assert advice.split(", ") == list(flags)
