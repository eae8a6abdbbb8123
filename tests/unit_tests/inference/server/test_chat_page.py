# SPDX-License-Identifier: Apache-2.0
"""The chat page: its content security policy, and a conversation in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.inference.server.api.operations import content_policy
from tests.support.browser import Page, chromium, opened
from tests.support.http_server import Served, served, until
from tests.support.scripted_model import TEMPLATE, Scripted

KEY = "secret-key"


def test_content_policy_allows_only_the_pages_script() -> None:
    policy = content_policy("<script>a</script>")
    other_policy = content_policy("<script>b</script>")
    (digest,) = re.findall(r"script-src ('sha256-[\w+/=]+')", policy)
    # printf a | openssl dgst -sha256 -binary | base64
    assert digest == "'sha256-ypeBEsobvcr6wjGzmiPcTaeG7/gUfE5yuYB3ha/uSLs='"
    assert digest not in other_policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(key=KEY) as running:
        yield running


def test_page_needs_no_key_and_no_external_resource(server: Served) -> None:
    response = server.http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == content_policy(response.text)
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)|https?:|url\(|@import""", response.text)
    assert KEY not in response.text


def test_every_control_has_a_label(server: Served) -> None:
    text = server.http.get("/").text
    controls = re.findall(r'<(?:input|textarea)[^>]* ?id="(\w+)"', text)
    assert len(controls) > 7
    assert set(controls) <= set(re.findall(r'<label for="(\w+)"', text))


@pytest.fixture
def page(server: Served, tmp_path: Path) -> Iterator[Page]:
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with opened(program, tmp_path / "profile") as browser_page:
        browser_page.open(server.url + "/")
        yield browser_page
        assert browser_page.complaints() == []
        assert all(url.startswith((server.url, "data:,")) for url in browser_page.requests())


@pytest.fixture(scope="module")
def reasoning_server() -> Iterator[Served]:
    """A server whose answers a test chooses, with reasoning."""
    template = {"source": TEMPLATE, "name": "shows all"}
    formats = {"tools": None, "reasoning": "qwen3"}
    with served(Scripted(), template=template, formats=formats) as running:
        yield running


HOSTILE = "<img src=x onerror=hacked=1><script>hacked=1</script>"
#: Messages, answers, and the tags and texts of the answers' blocks.
CHATS = (
    (f"{HOSTILE} &amp;", HOSTILE, [["P", HOSTILE]]),
    (
        "code",
        f"a\n\n~~~html\n{HOSTILE}\n```\n\n\tx\n~~~\n\nb ```c``` d\n```\nopen",
        [["P", "a"], ["PRE", f"{HOSTILE}\n```\n\n\tx"], ["P", "b ```c``` d"], ["PRE", "open"]],
    ),
)
BLOCKS = "[...log.querySelectorAll('.assistant > div > *')].map((b) => [b.tagName, b.textContent])"
TITLES = "[...list.querySelectorAll('li button:first-child')].map((b) => b.textContent)"
LAST_MESSAGE = "document.querySelector('article:last-child > div').textContent"


@pytest.mark.slow(seconds=15)
def test_conversation_runs_in_a_browser(server: Served, page: Page) -> None:
    # Without a key, an alert and the settings are shown; the text stays in the input field.
    page.run("settings.open = false")
    page.type("hello")
    page.press("Enter", 13, text="\r")
    page.until("document.querySelector('[role=alert]').innerText.includes('API key')")
    assert page.run("[message.value, settings.open, chat.turns.length]") == ["hello", True, 0]
    page.click("#key")
    page.type(KEY)
    page.press("Tab", 9)  # the key is stored when the field loses focus
    page.until("document.title === 'next-byte'")
    page.run("temperature.value = 0; message.focus()")
    # The answer is streamed while the engine still runs.
    server.model.gate.clear()
    page.press("Enter", 13, text="\r")
    page.until("!stop.hidden && send.hidden")
    assert page.run("error.hidden")
    server.model.gate.set()
    page.until(f"{LAST_MESSAGE}.includes('abcdef')")
    page.until("stop.hidden && status.textContent.includes('tokens/s')")
    assert "tokens," in page.run("status.textContent")
    # The next turn contains the history, the system prompt and the token limit.
    page.click("#system")
    page.type("be kind")
    page.click("#max_tokens")
    page.run("element('max_tokens').value = ''")
    page.type("4")
    page.run("temperature.value = 0; message.focus()")
    page.type("again")
    page.press("Enter", 13, text="\r")
    page.until("stop.hidden && chat.turns.length === 4")
    assert page.run(f"{LAST_MESSAGE}.length") == 4
    roles = page.run("body().messages.map((m) => m.role)")
    assert roles == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.slow(seconds=10)
def test_answer_is_stopped_in_a_browser(server: Served, page: Page) -> None:
    page.click("#key")
    page.type(KEY)
    page.run("temperature.value = 0; message.focus()")
    steps = iter(range(1 << 30))
    server.model.before = lambda: next(steps) > 40 and server.model.gate.clear()
    page.type("count")
    page.press("Enter", 13, text="\r")
    page.until("stop.hidden === false && log.textContent.length > 40")
    page.press("Escape", 27)
    page.until("stop.hidden && status.textContent === 'Stopped'")
    server.model.before = lambda: None
    server.model.gate.set()
    until(lambda: server.engine.unfinished == 0)
    assert page.run("chat.turns.length") == 2
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
    assert page.run("document.querySelector('#chats').offsetWidth") == 0  # folded
    page.click("#menu")
    page.click("#new")
    assert page.run("document.querySelector('#chats').offsetWidth") == 0
    assert page.run("log.children.length + chat.turns.length") == 0


@pytest.mark.slow(seconds=10)
def test_reasoning_and_edited_messages_on_a_phone(reasoning_server: Served, tmp_path: Path) -> None:
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with opened(program, tmp_path / "profile") as page:
        page.screenshot(tmp_path / "phone.png", 390, 844)
        page.open(reasoning_server.url + "/")
        page.run("temperature.value = 0; message.focus()")
        assert not page.run("settings.open")
        # An answer of reasoning only is a turn too.
        for text, script, answer in (
            ("one", "<think>\nhm\n</think>\nyes", "yes"),
            ("two", "<think>\nso much to", ""),
        ):
            reasoning_server.model.say(script)
            page.type(text)
            page.press("Enter", 13, text="\r")
            page.until("chat.turns.length && stop.hidden && document.activeElement === message")
            assert page.run(LAST_MESSAGE) == answer
        assert page.run("document.querySelector('details p').textContent") == "hm"
        assert page.run("chat.turns.map((t) => t.content)") == ["one", "yes", "two", ""]
        assert page.run("document.documentElement.scrollWidth") == 390
        page.click("article:nth-child(3) button")
        assert page.run("[message.value, chat.turns.length, log.children.length]") == ["two", 2, 2]
        assert page.complaints() == []


@pytest.mark.slow(seconds=10)
def test_chats_are_stored_switched_and_deleted(reasoning_server: Served, tmp_path: Path) -> None:
    program, model = chromium(), reasoning_server.model
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with opened(program, tmp_path / "profile") as page:
        page.screenshot(tmp_path / "wide.png", 1280, 800)
        page.open(reasoning_server.url + "/")

        def ask(text: str) -> None:
            page.run("temperature.value = 0; message.focus()")
            page.type(text)
            page.press("Enter", 13, text="\r")

        def switch(text: str) -> None:
            page.run(f"[...list.querySelectorAll('button')].find(b => b.title == {text!r}).click()")

        # A table of chats. Reloading the page keeps them, and markup stays text.
        for question, script, blocks in CHATS:
            model.say(script)
            page.click("#new")
            ask(question)
            page.until("chat.turns.length && stop.hidden")
            assert page.run(BLOCKS) == blocks
        page.open(reasoning_server.url + "/")
        assert page.run(TITLES) == [question for question, *_ in reversed(CHATS)]
        for question, script, blocks in CHATS:
            switch(question)
            assert page.run("chat.turns.map((t) => t.content)") == [question, script]
            assert page.run(BLOCKS) == blocks
        assert page.run("document.querySelectorAll('img, script').length") == 1
        assert page.run("typeof hacked") == "undefined"
        # An answer goes to its own chat, although another one is opened meanwhile.
        answer = "0123456789" * 5
        steps = iter(range(1 << 30))
        model.before = lambda: next(steps) == 20 and model.gate.clear()
        model.say(answer)
        ask("count")
        page.until("log.lastChild.lastChild.textContent.length > 8")
        switch(CHATS[0][0])
        page.type("draft")
        assert page.run("[chat.turns.length, stop.hidden, message.value]") == [2, True, "draft"]
        model.gate.set()
        page.until("chats.every((each) => !each.abort)")
        assert page.run(BLOCKS) == CHATS[0][2]
        switch("code")
        assert page.run(LAST_MESSAGE) == answer
        assert page.run("message.value") == ""
        # A chat that is deleted stays deleted.
        page.run("window.confirm = () => true")
        page.click("#list li:first-child button:last-child")
        page.open(reasoning_server.url + "/")
        assert page.run(TITLES) == [CHATS[0][0]]
        assert page.complaints() == []


#: A script before the page's own, the messages, and the titles after the page is reloaded.
STORAGES = {
    "oldest": ("", ["a" * 900_000, "b" * 900_000, "c" * 900_000], ["c", "b"]),
    "full": ("Storage.prototype.setItem = () => { throw new Error('full') }", ["a"], []),
    "blocked": (
        "for (const name of ['localStorage', 'sessionStorage'])"
        "Object.defineProperty(window, name, { get() { throw new Error('blocked') } })",
        ["a"],
        [],
    ),
    "foreign": (
        "for (const text of ['{', 'null', JSON.stringify({ time: 1, turns: [{ role: 'user' }] })])"
        "localStorage.setItem('chat-' + text, text)",
        ["a"],
        ["a"],
    ),
}


@pytest.mark.slow(seconds=10)
def test_chat_storage_is_bounded_and_optional(server: Served, tmp_path: Path) -> None:
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    for name, (script, texts, titles) in STORAGES.items():
        with opened(program, tmp_path / name) as page:
            page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
            page.open(server.url + "/")
            for text in texts:
                page.run("openNewChat()")
                page.run(
                    f"message.value = {text!r}; body = () => ({{ stream: true, temperature: 0,"
                    "max_tokens: 1, messages: [{ role: 'user', content: 'a' }] });"
                    f"key.value = {KEY!r}; submit()"
                )
                page.until("chat.turns.length === 2 && stop.hidden")
            assert page.run("document.querySelector('#unsaved').hidden") == bool(titles), name
            page.open(server.url + "/")
            stored = page.run("chats.filter((c) => c.turns.length).map(titleOf)")
            assert [title[:1] for title in stored] == titles, name
            assert page.complaints() == [], name
