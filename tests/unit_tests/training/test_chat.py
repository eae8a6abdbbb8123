# SPDX-License-Identifier: Apache-2.0
"""Conversations encoded to ids and masks: against transformers, by hand, and refusals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.cli.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from megatron.training.data.chat import (
    BUILT_IN,
    ChatTemplate,
    MalformedConversation,
    Prefix,
    TemplateLimits,
    TemplateRefusal,
    read_chat_template,
)
from tests.support.conversations import encode_conversation

CONVERSATION = [
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

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello more fine assistant user"] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": MARKED}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("source", [*BUILT_IN.values(), MARKED], ids=[*BUILT_IN, "marked"])
def test_ids_and_mask_match_transformers(folder, source):
    from transformers import PreTrainedTokenizerFast

    hf_tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>"
    )
    expected = hf_tokenizer.apply_chat_template(
        CONVERSATION,
        chat_template=source,
        return_dict=True,
        return_assistant_tokens_mask="endgeneration" in source,
    )
    template = ChatTemplate(source, {"eos_token": "<|im_end|>"})
    ids, mask = encode_conversation(CONVERSATION, HuggingFaceTokenizer(folder), template)
    assert ids == expected["input_ids"]
    assert 0 < sum(mask) < len(mask) == len(ids)
    if "endgeneration" in source:
        assert mask == expected["assistant_masks"]


@pytest.mark.parametrize("name", [*BUILT_IN, None])
def test_mask_covers_answers_and_their_end_tokens(folder, name):
    """The marked template (None) and the prefix search give the same spans."""
    tokenizer = HuggingFaceTokenizer(folder)
    template = read_chat_template(name, tokenizer_model=folder)
    ids, mask = encode_conversation(CONVERSATION, tokenizer, template)
    learnt = tokenizer._tokenizer.decode(
        [i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False
    )
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    second = "fine" if name == "llama3" else "\n fine\n"  # Llama's template trims contents
    assert learnt == f"Hello, wörld 語{end}{second}{end}"


def test_tokenizer_without_end_text_still_ends_turns():
    ids, mask = encode_conversation(CONVERSATION[1:3], ByteTokenizer(), read_chat_template("plain"))
    text = "user: Grüße? 日本\nassistant: ".encode()
    answer = [*"Hello, wörld 語".encode(), 256]
    assert ids == [*text, *answer]
    assert mask == [0] * len(text) + [1] * len(answer)


class _Subwords:
    """A tokenizer that merges pairs of characters from the left and has no offsets."""

    vocab_size, eod, fingerprint = 1 << 16, 0, "pairs"

    def tokenize(self, text, *, add_special_tokens=True):
        """Return one id for each pair."""
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]


def test_token_across_turn_boundary_is_learnt_without_offsets():
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
        ([*CONVERSATION, CONVERSATION[0]], "a system message is not the first"),
        (CONVERSATION[2:], "the assistant speaks first"),
        (CONVERSATION[:2], "no assistant message"),
    ],
)
def test_malformed_conversation_states_the_reason(messages, reason):
    with pytest.raises(MalformedConversation) as caught:
        encode_conversation(messages, ByteTokenizer(), read_chat_template("chatml"))
    assert caught.value.reason == reason


def test_template_refusal_is_a_malformed_conversation():
    template = ChatTemplate("{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(MalformedConversation, match="refuses it: roles must alternate"):
        encode_conversation(CONVERSATION, ByteTokenizer(), template)
    with pytest.raises(MalformedConversation, match="refuses it"):
        encode_conversation(
            CONVERSATION, ByteTokenizer(), ChatTemplate("{{ messages[9].content }}")
        )
    with pytest.raises(MalformedConversation) as caught:
        encode_conversation(
            [CONVERSATION[1], {"role": "assistant", "content": ""}],
            ByteTokenizer(),
            ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"),
        )
    assert caught.value.reason == "nothing to learn"


def test_a_template_that_is_not_prefix_stable_is_an_error():
    source = "{% for m in messages %}{{ m.content }}{{ '!' if loop.last }}{% endfor %}"
    with pytest.raises(ValueError, match=r"message 2 differently.*give --chat-template another"):
        encode_conversation(CONVERSATION, ByteTokenizer(), ChatTemplate(source))


def test_template_sources_are_tried_in_order(folder, tmp_path):
    assert read_chat_template(None, tokenizer_model=folder).source == MARKED
    assert read_chat_template(None, tokenizer_model=folder / "tokenizer.json").source == MARKED
    (tmp_path / "chat_template.jinja").write_text("of the file")
    named = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second"}]
    config = {"chat_template": named, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = read_chat_template(None, tokenizer_model=tmp_path)
    assert (template.source, template.special_tokens["bos_token"]) == ("of the file", "<s>")
    (tmp_path / "chat_template.jinja").rename(tmp_path / "mine.txt")
    assert read_chat_template(None, tokenizer_model=tmp_path).source == "first"
    assert read_chat_template(str(tmp_path / "mine.txt")).source == "of the file"
    prints = {read_chat_template(n).fingerprint for n in (*BUILT_IN, str(tmp_path / "mine.txt"))}
    assert len(prints) == 4


def test_invalid_template_sources_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no such file; give a file or one of chatml, llama3"):
        read_chat_template("chatlm")
    with pytest.raises(ValueError, match="has no chat template: give --chat-template"):
        read_chat_template(None, tokenizer_model=tmp_path)
    with pytest.raises(ValueError, match="is not a Jinja template"):
        ChatTemplate("{% for %}").check()
    with pytest.raises(ValueError, match="'random'"):
        ChatTemplate("{{ messages | random }}").check()
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="is damaged"):
        read_chat_template(None, tokenizer_model=tmp_path)
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="is not a chat template"):
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
        "{{ lipsum() }}",
    ],
)
def test_template_cannot_escape_its_sandbox(source):
    with pytest.raises(MalformedConversation, match="refuses it"):
        encode_conversation(CONVERSATION, ByteTokenizer(), ChatTemplate(source))


# Templates that must fail, by kind: the source and a part of the expected message.
HOSTILE = {
    "division": ("{{ 1 / 0 }}", "division by zero (line 1)"),
    "modulo": ("\n{{ 1 % 0 }}", "(line 2)"),
    "attribute": ("\n\n{{ messages[0].content.nothing.more }}", "(line 3)"),
    "value": ("{{ '%s %s' % 1 }}", "line 1"),
    "recursion": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "too deep"),
    "brackets": ("{{ " + "[" * 50_000 + "]" * 50_000 + " }}", "too deep"),
    "sum": ("{{ " + "1+" * 5000 + "1 }}", "too deep"),
    "loops in loops": (
        "{% for i in messages %}" * 60 + "{% endfor %}" * 60,
        "statically nested blocks",
    ),
    "conditions": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, ""),
    "digits": ("{{ 1" + "1" * 5000 + " }}", "4300"),
    "long text": ("{% for i in range(90000) %}{{ 'a' * 100 }}{% endfor %}", "9000000 characters"),
    "control": ("{{ raise_exception('a\x1b[2J\n\x07b' ~ 'c' * 900) }}", "a [2J b"),
    "width": ("{{ 'a' | center(10000000000) }}", "memory"),
    "format": ("{{ '%10000000000d' | format(1) }}", "memory"),
    "format method": ("{{ '{:10000000000}'.format(1) }}", "memory"),
    "doubling": (
        "{% set ns = namespace(a='aa') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}"
        "{% endfor %}",
        "memory",
    ),
    "iterations": (
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "CPU time",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_template_fails_with_one_line(case):
    source, reason = HOSTILE[case]
    limits = TemplateLimits(cpu_seconds=0.5, seconds=60, memory_bytes=64 << 20)
    template = ChatTemplate(source, name="the template T", limits=limits)
    with pytest.raises((ValueError, TemplateRefusal)) as caught:
        template.render([{"role": "user", "content": "x"}])
    text = str(caught.value)
    assert reason in text
    assert text.isprintable()
    assert len(text) < 600
    template.close()


def test_uninterruptible_computation_is_stopped():
    source = (
        "{% set ns = namespace(a=9) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}"
        "{% endfor %}"
    )
    template = ChatTemplate(source, limits=TemplateLimits(cpu_seconds=0.2, seconds=60))
    template.check()
    pid = template.pid
    with pytest.raises(ValueError, match=r"too much time|CPU time"):
        template.render([])
    assert not _is_running(pid)


def test_unresponsive_template_process_is_killed():
    template = ChatTemplate("{{ messages | length }}", limits=TemplateLimits(seconds=2))
    template.check()
    pid = template.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match=r"no text within 2 s"):
        template.render([])
    assert not _is_running(pid)
    template = ChatTemplate("{{ messages | length }}")
    assert template.render([]) == "0"


def test_refusal_affects_only_its_conversation():
    source = "{% for m in messages %}{{ 1 // (m.content | int) }}{% endfor %}"
    template = ChatTemplate(source)
    talks = [[{"role": "user", "content": digit}] for digit in "10110"]
    outcomes = template.render_all(talks, [[Prefix(0, prompt=True)]] * 5)
    assert [isinstance(outcome, TemplateRefusal) for outcome in outcomes] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert (outcomes[2].text, outcomes[2].lengths) == ("1", (0,))
    pid = template.pid
    assert template.render([]) == ""
    assert template.pid == pid  # a refusal ends nothing
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render([]) == ""
    assert template.pid != pid


def test_template_process_has_no_open_file_and_no_torch():
    template = ChatTemplate("")
    with open(os.devnull) as open_file:
        os.set_inheritable(open_file.fileno(), True)
        template.check()
    pid = template.pid
    assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    assert "Max open files            3 " in Path(f"/proc/{pid}/limits").read_text()


def test_template_process_exits_when_parent_is_killed():
    code = (
        "import os, sys, time\n"
        "from megatron.training.data.chat import ChatTemplate\n"
        "template = ChatTemplate('')\n"
        "template.check()\n"
        "if os.fork() == 0:\n"  # the fork inherits the parent's pipe end and outlives the parent
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(template.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        with parent.stdout:
            pid = int(parent.stdout.readline())
        assert _is_running(pid)
        parent.kill()
        parent.wait()
        for _ in range(600):
            if not _is_running(pid):
                break
            time.sleep(0.1)
        assert not _is_running(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def test_forked_process_starts_its_own_template_process():
    template = ChatTemplate("{{ messages | length }}")
    assert template.render([]) == "0"
    pid = template.pid
    child = os.fork()
    if child == 0:
        works = template.pid is None and template.render([{}]) == "1" and template.pid != pid
        template.close()
        os._exit(0 if works else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render([{}, {}]) == "2"
    assert template.pid == pid


def _is_running(pid):
    """Return whether the process exists and has not exited."""
    if pid is None:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("source", ["{{ 'a' * 10000000000 }}", "{{ 9 ** 9 ** 9 }}"])
def test_large_products_and_powers_are_refused(source):
    with pytest.raises(TemplateRefusal, match=r"product|power"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_products_of_common_templates_still_work():
    template = ChatTemplate("{{ '-' * 3 }}{{ 4 * 5 }}")
    assert template.render([]) == "---20"
