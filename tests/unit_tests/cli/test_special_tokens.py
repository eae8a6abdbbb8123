# SPDX-License-Identifier: Apache-2.0
"""Special tokens around texts are those of `transformers`, in token files as in prompts."""

import json
from pathlib import Path
from unittest import mock

import pytest
import sentencepiece
import transformers

from megatron.cli.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.inference.checkpoint_model import choose_tokenizer
from megatron.training.config import TokenizerConfig
from megatron.training.data.chat import read_chat_template
from megatron.training.data.preprocessing.output import Output
from megatron.training.data.vocabulary import read_vocabulary
from megatron.training.inspect_data import _main as inspect
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from tests.support.conversations import encode_conversation
from tests.support.llama_tokenizer import BOS, EOS, write_llama_tokenizer

TEXTS = ["the thing of a theatre", " in it", "日本 é", "</s>the end</s>"]
TALK = [
    {"role": "user", "content": "the thing"},
    {"role": "assistant", "content": "in it"},
]
LEAVE_OUT = {"tokenizer_hf_no_include_special_tokens": True}


def write(tmp_path, name="data", **options):
    """Write token files of the texts with the tokenizer in `tok` and return their prefix."""
    lines = [json.dumps({"text": text, "messages": TALK}) for text in TEXTS]
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
    """Make files look as if written before there was a record of special tokens."""
    path = Path(f"{prefix}.json")
    described = json.loads(path.read_text())
    del described["tokenizer"]["special_tokens"]
    path.write_text(json.dumps(described))


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "$A </s>", "$A", None])
def test_ids_are_those_of_transformers(tmp_path, template):
    theirs = write_llama_tokenizer(tmp_path, template=template)
    ours = HuggingFaceTokenizer(tmp_path)
    wanted = [theirs(text).input_ids for text in TEXTS]
    assert [ours.tokenize(text) for text in TEXTS] == ours.encode_batch(TEXTS) == wanted
    assert (wanted[0][0] == BOS, wanted[0][-1] == EOS) == (
        bool(ours.special_tokens.before), bool(ours.special_tokens.after)
    )  # fmt: skip
    plain = [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert [ours.tokenize(text, add_special_tokens=False) for text in TEXTS] == plain
    without = HuggingFaceTokenizer(tmp_path, add_special_tokens=False)
    assert [without.tokenize(text) for text in TEXTS] == without.encode_batch(TEXTS) == plain
    assert not without.special_tokens
    assert [ours.detokenize(ids) for ids in wanted] == [ours.detokenize(ids) for ids in plain]


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_token_files_hold_the_ids_of_transformers(tmp_path, template):
    theirs = write_llama_tokenizer(tmp_path / "tok", template=template)
    wanted = [theirs(text).input_ids for text in TEXTS]
    assert documents(write(tmp_path)) == wanted
    ended = [ids if ids[-1] == EOS else [*ids, EOS] for ids in wanted]
    assert documents(write(tmp_path, "ended", append_eod=True)) == ended
    plain = [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert documents(write(tmp_path, "plain", **LEAVE_OUT)) == plain


def test_a_conversation_has_what_its_template_writes_alone(tmp_path):
    theirs = write_llama_tokenizer(tmp_path / "tok")
    wanted = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    template = read_chat_template(None, tokenizer_model=tmp_path / "tok")
    ids, _ = encode_conversation(TALK, HuggingFaceTokenizer(tmp_path / "tok"), template)
    assert ids == wanted
    assert ids.count(BOS) == 1
    assert documents(write(tmp_path, chat=True)) == [wanted] * len(TEXTS)


def test_a_run_on_files_written_the_other_way_is_refused(tmp_path):
    write_llama_tokenizer(tmp_path / "tok")
    include = TokenizerConfig(tokenizer_model=str(tmp_path / "tok"))
    leave_out = TokenizerConfig(tokenizer_model=str(tmp_path / "tok"), **LEAVE_OUT)
    files, plain = write(tmp_path), write(tmp_path, "plain", **LEAVE_OUT)
    assert read_vocabulary(include, [files]).tokenizer["special_tokens"]["before"] == [BOS]
    assert read_vocabulary(leave_out, [plain]).tokenizer["special_tokens"]["before"] == []
    for config, prefixes in [
        (include, [plain]), (include, [files, plain]), (leave_out, [files]),
        (TokenizerConfig(**LEAVE_OUT), [files]), (TokenizerConfig(), [files, plain]),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="write the files again"):
            read_vocabulary(config, prefixes)
    forget_record(plain)
    read_vocabulary(leave_out, [plain])
    with pytest.raises(ValueError, match="--tokenizer-hf-no-include-special-tokens"):
        read_vocabulary(include, [plain])


def test_a_template_writes_its_own_and_fits_every_run(tmp_path):
    write_llama_tokenizer(tmp_path / "tok")
    chats = write(tmp_path, chat=True)
    for options in ({}, LEAVE_OUT):
        config = TokenizerConfig(tokenizer_model=str(tmp_path / "tok"), **options)
        read_vocabulary(config, [chats])
        forget_record(chats) if options == {} else None
    found = read_vocabulary(TokenizerConfig(), [chats]).tokenizer
    assert choose_tokenizer(found, None).tokenize("the")[0] == BOS


def test_resuming_the_other_way_is_refused(tmp_path):
    write_llama_tokenizer(tmp_path / "tok")

    def stopped(**options):
        """Stop after everything was committed and nothing published."""
        with (
            mock.patch.object(Output, "publish", side_effect=OSError("full")),
            pytest.raises(OSError, match="full"),
        ):
            write(tmp_path, resume=True, **options)

    stopped(**LEAVE_OUT)
    with pytest.raises(ValueError, match="--tokenizer-hf-no-include-special-tokens"):
        write(tmp_path, resume=True)
    plain = documents(write(tmp_path, resume=True, **LEAVE_OUT))
    stopped(overwrite=True)
    with pytest.raises(ValueError, match="--tokenizer-hf-no-include-special-tokens"):
        write(tmp_path, resume=True, **LEAVE_OUT)
    assert documents(write(tmp_path, resume=True)) == [[BOS, *ids] for ids in plain]


def test_prompts_are_encoded_as_the_texts_of_training(tmp_path, capsys):
    write_llama_tokenizer(tmp_path / "tok")
    for options, first in (({}, True), (LEAVE_OUT, False)):
        prefix = write(tmp_path, overwrite=True, **options)
        recorded = read_vocabulary(TokenizerConfig(), [prefix]).tokenizer
        for model in (None, str(tmp_path / "tok")):
            found = choose_tokenizer(recorded, model)
            assert (found.tokenize("the")[0] == BOS) == first
            for add in (True, False):
                asked = choose_tokenizer(recorded, model, add_special_tokens=add)
                assert (asked.tokenize("the")[0] == BOS) == add
        inspect([prefix])
        assert ("special tokens 1 before" in capsys.readouterr().out) == first
    # A checkpoint of before there was a record was trained on texts without special tokens.
    del recorded["special_tokens"]
    assert choose_tokenizer(recorded, None).tokenize("the")[0] != BOS
    # One that names no tokenizer was not.
    assert choose_tokenizer({}, str(tmp_path / "tok")).tokenize("the")[0] == BOS


def test_sentencepiece_adds_what_the_folder_asks_for(tmp_path):
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
            theirs = transformers.LlamaTokenizer.from_pretrained(str(tmp_path))
            wanted = [theirs(text).input_ids for text in texts]
        else:
            wanted = reference.encode(texts)
        ours = SentencePieceTokenizer(tmp_path)
        assert [ours.tokenize(text) for text in texts] == wanted
        assert ours.encode_batch(texts) == wanted
        assert [ids.tolist() for ids in ours.encode_arrays(texts)] == wanted
        plain = SentencePieceTokenizer(tmp_path, add_special_tokens=False)
        assert [ids.tolist() for ids in plain.encode_arrays(texts)] == reference.encode(texts)
        assert [ours.detokenize(ids) for ids in wanted] == texts
