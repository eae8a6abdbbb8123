# SPDX-License-Identifier: Apache-2.0
"""Conversations to ids and masks: against transformers, by hand, and what is refused."""

from __future__ import annotations

import json

import pytest

from megatron.training.data import chat_template
from megatron.training.data.chat import (
    MalformedConversation,
    encode_conversation,
    read_chat_template,
)
from megatron.training.data.chat_template import BUILT_IN, ChatTemplate
from megatron.training.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße? 日本"},
    {"role": "assistant", "content": "Hello, wörld 語"},
    {"role": "user", "content": "more\n"},
    {"role": "assistant", "content": "\n fine\n"},
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>")
SPECIAL += ("<|start_header_id|>", "<|end_header_id|>")
MARKED = (
    "{%- for m in messages %}\n    {%- if m.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}\n    {%- else %}\n"
    "        {{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}\n"
    "    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a tokenizer's folder: byte-level BPE with the special tokens of chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(["hello more fine assistant user"] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    made.save(str(path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": MARKED}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("source", [*BUILT_IN.values(), MARKED], ids=[*BUILT_IN, "marked"])
def test_ids_and_mask_are_those_of_transformers(folder, source):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>"
    )
    wanted = theirs.apply_chat_template(
        TALK,
        chat_template=source,
        return_dict=True,
        return_assistant_tokens_mask="endgeneration" in source,
    )
    template = ChatTemplate(source, {"eos_token": "<|im_end|>"})
    ids, mask = encode_conversation(TALK, HuggingFaceTokenizer(folder), template)
    assert ids == wanted["input_ids"]
    assert 0 < sum(mask) < len(mask) == len(ids)
    if "endgeneration" in source:
        assert mask == wanted["assistant_masks"]


@pytest.mark.parametrize("name", [*BUILT_IN, None])
def test_the_mask_is_the_answers_and_their_ends(folder, name):
    """The marked template (None) and the search by prefixes come to the same spans."""
    tokenizer = HuggingFaceTokenizer(folder)
    template = read_chat_template(name, tokenizer_model=folder)
    ids, mask = encode_conversation(TALK, tokenizer, template)
    learnt = tokenizer._tokenizer.decode(
        [i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False
    )
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    second = "fine" if name == "llama3" else "\n fine\n"  # Llama's template trims contents
    assert learnt == f"Hello, wörld 語{end}{second}{end}"


def test_a_tokenizer_without_a_text_for_the_end_still_ends_its_turns():
    ids, mask = encode_conversation(TALK[1:3], ByteTokenizer(), read_chat_template("plain"))
    text = "user: Grüße? 日本\nassistant: ".encode()
    answer = [*"Hello, wörld 語".encode(), 256]
    assert ids == [*text, *answer]
    assert mask == [0] * len(text) + [1] * len(answer)


class _Subwords:
    """A tokenizer that merges pairs of characters from the left and knows no offsets."""

    vocab_size, eod, fingerprint = 1 << 16, 0, "pairs"

    def tokenize(self, text):
        """Return one id for each pair."""
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]


def test_a_token_over_the_border_is_learnt_without_offsets():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    talk = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defg"}]
    _, mask = encode_conversation(talk, _Subwords(), template)
    assert mask == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no list of messages"),
        ({"role": "user"}, "no list of messages"),
        ([], "no list of messages"),
        (["hello"], "a message without a role"),
        ([{"content": "x"}], "a message without a role"),
        ([{"role": "robot", "content": "x"}], "unknown role"),
        ([{"role": ["user"], "content": "x"}], "unknown role"),
        ([{"role": "user", "content": None}], "content is no text"),
        ([{"role": "user", "content": "a\ue0f1b"}], "a reserved character"),
        ([*TALK, TALK[0]], "a system message is not the first"),
        (TALK[2:], "the assistant speaks first"),
        (TALK[:2], "no assistant message"),
    ],
)
def test_a_malformed_conversation_has_a_reason(messages, reason):
    with pytest.raises(MalformedConversation) as caught:
        encode_conversation(messages, ByteTokenizer(), read_chat_template("chatml"))
    assert caught.value.reason == reason


def test_a_template_may_refuse():
    template = ChatTemplate("{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(MalformedConversation, match="refuses it: roles must alternate"):
        encode_conversation(TALK, ByteTokenizer(), template)
    with pytest.raises(MalformedConversation, match="refuses it"):
        encode_conversation(TALK, ByteTokenizer(), ChatTemplate("{{ messages[9].content }}"))
    with pytest.raises(MalformedConversation) as caught:
        encode_conversation(
            [TALK[1], {"role": "assistant", "content": ""}],
            ByteTokenizer(),
            ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"),
        )
    assert caught.value.reason == "nothing to learn"


def test_a_template_that_is_not_prefix_stable_is_an_error():
    source = "{% for m in messages %}{{ m.content }}{{ '!' if loop.last }}{% endfor %}"
    with pytest.raises(ValueError, match=r"message 2 differently.*give --chat-template another"):
        encode_conversation(TALK, ByteTokenizer(), ChatTemplate(source))


def test_where_templates_come_from(folder, tmp_path):
    assert read_chat_template(None, tokenizer_model=folder).source == MARKED
    assert read_chat_template(None, tokenizer_model=folder / "tokenizer.json").source == MARKED
    (tmp_path / "chat_template.jinja").write_text("of the file")
    named = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second"}]
    config = {"chat_template": named, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_chat_template(None, tokenizer_model=tmp_path)
    assert (found.source, found.special_tokens["bos_token"]) == ("of the file", "<s>")
    (tmp_path / "chat_template.jinja").rename(tmp_path / "mine.txt")
    assert read_chat_template(None, tokenizer_model=tmp_path).source == "first"
    assert read_chat_template(str(tmp_path / "mine.txt")).source == "of the file"
    prints = {read_chat_template(n).fingerprint for n in (*BUILT_IN, str(tmp_path / "mine.txt"))}
    assert len(prints) == 4


def test_templates_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="no such file; give a file or one of chatml, llama3"):
        read_chat_template("chatlm")
    with pytest.raises(ValueError, match="has no chat template: give --chat-template"):
        read_chat_template(None, tokenizer_model=tmp_path)
    with pytest.raises(ValueError, match="is no Jinja template"):
        ChatTemplate("{% for %}")
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="is damaged"):
        read_chat_template(None, tokenizer_model=tmp_path)
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="no chat template"):
        read_chat_template(str(tmp_path / "large"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source):
    with pytest.raises(MalformedConversation, match="refuses it"):
        encode_conversation(TALK, ByteTokenizer(), ChatTemplate(source))


HOSTILE = {
    "loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "calls": "{% macro again(n) %}{{ again(n + 1) }}{{ again(n + 1) }}{% endmacro %}"
    "{% for i in range(90000) %}{% for j in range(90000) %}{{ i ~ j }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_without_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS_PER_CONVERSATION", 0.2)
    template = chat_template.ChatTemplate(source, name="the template T")
    with pytest.raises(ValueError, match=r"^the template T takes too much time"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("source", ["{{ 'a' * 10000000000 }}", "{{ 9 ** 9 ** 9 }}"])
def test_a_template_cannot_fill_the_memory_by_a_product(source):
    with pytest.raises(chat_template.TemplateRefusal, match=r"product|power"):
        chat_template.ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_products_of_common_templates_still_work():
    template = chat_template.ChatTemplate("{{ '-' * 3 }}{{ 4 * 5 }}")
    assert template.render([]) == "---20"
