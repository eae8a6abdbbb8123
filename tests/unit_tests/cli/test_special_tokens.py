# SPDX-License-Identifier: Apache-2.0
"""Special tokens around texts match `transformers`, in token files and in prompts."""

import json
from pathlib import Path
from unittest import mock

import pytest
import sentencepiece
import transformers

from megatron.cli.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, choose_tokenizer
from megatron.core.datasets import IndexedDataset
from megatron.training.config import TokenizerConfig
from megatron.training.data.chat import read_chat_template
from megatron.training.data.journaled_output import Output
from megatron.training.data.vocabulary import read_vocabulary
from megatron.training.inspect_data import _main as inspect
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from tests.support.conversations import encode_conversation
from tests.support.llama_tokenizer import BOS, EOS, write_llama_tokenizer

TEXTS = ["the thing of a theatre", " in it", "日本 é", "</s>the end</s>"]
CONVERSATION = [
    {"role": "user", "content": "the thing"},
    {"role": "assistant", "content": "in it"},
]
NO_SPECIAL_TOKENS = {"tokenizer_hf_no_include_special_tokens": True}


def write_token_files(tmp_path, name="data", **options):
    """Write token files of the texts with the tokenizer in `tok` and return their prefix."""
    lines = [json.dumps({"text": text, "messages": CONVERSATION}) for text in TEXTS]
    if not (tmp_path / "texts.jsonl").exists():
        (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    prefix = str(tmp_path / name)
    preprocess(
        PreprocessConfig(
            input=(str(tmp_path / "texts.jsonl"),), output_prefix=prefix,
            tokenizer_model=str(tmp_path / "tok"), **options,
        )
    )  # fmt: skip
    return prefix


def documents(prefix):
    """Return the ids of all documents."""
    data = IndexedDataset(prefix)
    return [data.get(number).tolist() for number in range(data.num_documents)]


def forget_record(prefix):
    """Make files look as if they were written before special tokens were recorded."""
    path = Path(f"{prefix}.json")
    described = json.loads(path.read_text())
    del described["tokenizer"]["special_tokens"]
    path.write_text(json.dumps(described))


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "$A </s>", "$A", None])
def test_special_tokens_match_transformers(tmp_path, template):
    hf = write_llama_tokenizer(tmp_path, template=template)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    expected = [hf(text).input_ids for text in TEXTS]
    assert [tokenizer.tokenize(text) for text in TEXTS] == tokenizer.encode_batch(TEXTS) == expected
    assert (expected[0][0] == BOS, expected[0][-1] == EOS) == (
        bool(tokenizer.special_tokens.before), bool(tokenizer.special_tokens.after)
    )  # fmt: skip
    plain = [hf(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert [tokenizer.tokenize(text, add_special_tokens=False) for text in TEXTS] == plain
    without = HuggingFaceTokenizer(tmp_path, add_special_tokens=False)
    assert [without.tokenize(text) for text in TEXTS] == without.encode_batch(TEXTS) == plain
    assert not without.special_tokens
    assert [tokenizer.detokenize(ids) for ids in expected] == [
        tokenizer.detokenize(ids) for ids in plain
    ]


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_token_files_match_transformers(tmp_path, template):
    hf = write_llama_tokenizer(tmp_path / "tok", template=template)
    expected = [hf(text).input_ids for text in TEXTS]
    assert documents(write_token_files(tmp_path)) == expected
    ended = [ids if ids[-1] == EOS else [*ids, EOS] for ids in expected]
    assert documents(write_token_files(tmp_path, "ended", append_eod=True)) == ended
    plain = [hf(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert documents(write_token_files(tmp_path, "plain", **NO_SPECIAL_TOKENS)) == plain


def test_conversation_has_only_special_tokens_of_its_template(tmp_path):
    hf = write_llama_tokenizer(tmp_path / "tok")
    expected = hf.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True)["input_ids"]
    template = read_chat_template(None, tokenizer_model=tmp_path / "tok")
    ids, _ = encode_conversation(CONVERSATION, HuggingFaceTokenizer(tmp_path / "tok"), template)
    assert ids == expected
    assert ids.count(BOS) == 1
    assert documents(write_token_files(tmp_path, chat=True)) == [expected] * len(TEXTS)


def test_run_on_files_of_the_opposite_setting_is_refused(tmp_path):
    write_llama_tokenizer(tmp_path / "tok")
    include = TokenizerConfig(tokenizer_model=str(tmp_path / "tok"))
    exclude = TokenizerConfig(tokenizer_model=str(tmp_path / "tok"), **NO_SPECIAL_TOKENS)
    files = write_token_files(tmp_path)
    plain = write_token_files(tmp_path, "plain", **NO_SPECIAL_TOKENS)
    assert read_vocabulary(include, [files]).tokenizer["special_tokens"]["before"] == [BOS]
    assert read_vocabulary(exclude, [plain]).tokenizer["special_tokens"]["before"] == []
    for config, prefixes in [
        (include, [plain]), (include, [files, plain]), (exclude, [files]),
        (TokenizerConfig(**NO_SPECIAL_TOKENS), [files]), (TokenizerConfig(), [files, plain]),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="write the files again"):
            read_vocabulary(config, prefixes)
    forget_record(plain)
    read_vocabulary(exclude, [plain])
    with pytest.raises(ValueError, match="--tokenizer-hf-no-include-special-tokens"):
        read_vocabulary(include, [plain])


def test_chat_files_fit_runs_of_either_setting(tmp_path):
    write_llama_tokenizer(tmp_path / "tok")
    chats = write_token_files(tmp_path, chat=True)
    for options in ({}, NO_SPECIAL_TOKENS):
        config = TokenizerConfig(tokenizer_model=str(tmp_path / "tok"), **options)
        read_vocabulary(config, [chats])
        forget_record(chats) if options == {} else None
    recorded = read_vocabulary(TokenizerConfig(), [chats]).tokenizer
    assert choose_tokenizer(recorded, None).tokenize("the")[0] == BOS


def test_resuming_with_the_opposite_setting_is_refused(tmp_path):
    write_llama_tokenizer(tmp_path / "tok")

    def write_and_stop(**options):
        """Stop after all output is committed and before any of it is published."""
        with (
            mock.patch.object(Output, "publish", side_effect=OSError("full")),
            pytest.raises(OSError, match="full"),
        ):
            write_token_files(tmp_path, resume=True, **options)

    write_and_stop(**NO_SPECIAL_TOKENS)
    with pytest.raises(ValueError, match="--tokenizer-hf-no-include-special-tokens"):
        write_token_files(tmp_path, resume=True)
    plain = documents(write_token_files(tmp_path, resume=True, **NO_SPECIAL_TOKENS))
    write_and_stop(overwrite=True)
    with pytest.raises(ValueError, match="--tokenizer-hf-no-include-special-tokens"):
        write_token_files(tmp_path, resume=True, **NO_SPECIAL_TOKENS)
    assert documents(write_token_files(tmp_path, resume=True)) == [[BOS, *ids] for ids in plain]


def test_prompts_are_encoded_as_training_texts(tmp_path, capsys):
    write_llama_tokenizer(tmp_path / "tok")
    for options, has_bos in (({}, True), (NO_SPECIAL_TOKENS, False)):
        prefix = write_token_files(tmp_path, overwrite=True, **options)
        recorded = read_vocabulary(TokenizerConfig(), [prefix]).tokenizer
        for model in (None, str(tmp_path / "tok")):
            tokenizer = choose_tokenizer(recorded, model)
            assert (tokenizer.tokenize("the")[0] == BOS) == has_bos
            for add in (True, False):
                overridden = choose_tokenizer(recorded, model, add_special_tokens=add)
                assert (overridden.tokenize("the")[0] == BOS) == add
        inspect([prefix])
        assert ("special tokens 1 before" in capsys.readouterr().out) == has_bos
    # A checkpoint without a record of special tokens was trained on texts without them.
    del recorded["special_tokens"]
    assert choose_tokenizer(recorded, None).tokenize("the")[0] != BOS
    # A checkpoint that names no tokenizer was trained with them.
    assert choose_tokenizer({}, str(tmp_path / "tok")).tokenize("the")[0] == BOS


def test_sentencepiece_follows_add_bos_and_add_eos_token(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the theory of the thing", "a def is a def of a thing"] * 20),
        model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, model_type="bpe",
    )  # fmt: skip
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    texts = ["the thing of a def", "a"]
    for bos, eos in ((None, None), (True, False), (False, True), (True, True)):
        if bos is not None:
            fields = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": bos,
                      "add_eos_token": eos}  # fmt: skip
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
            hf = transformers.LlamaTokenizer.from_pretrained(str(tmp_path))
            expected = [hf(text).input_ids for text in texts]
        else:
            expected = reference.encode(texts)
        tokenizer = SentencePieceTokenizer(tmp_path)
        assert [tokenizer.tokenize(text) for text in texts] == expected
        assert tokenizer.encode_batch(texts) == expected
        assert [ids.tolist() for ids in tokenizer.encode_arrays(texts)] == expected
        plain = SentencePieceTokenizer(tmp_path, add_special_tokens=False)
        assert [ids.tolist() for ids in plain.encode_arrays(texts)] == reference.encode(texts)
        assert [tokenizer.detokenize(ids) for ids in expected] == texts
