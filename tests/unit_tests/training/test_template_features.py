# SPDX-License-Identifier: Apache-2.0
"""Every filter, test and global of Jinja renders in a process that cannot open files.

Modules that Jinja and the standard library import on first use are loaded before the process loses
access to files. The expected texts come from transformers, which renders without such limits.
"""

from __future__ import annotations

import pytest
from jinja2 import defaults

from megatron.training.data.chat import ChatTemplate, TemplateRefusal

CONVERSATION = [
    {"role": "user", "content": "<b>Some &amp; bold</b> text é, at https://example.com/a?b=c"},
    {"role": "assistant", "content": "one two three four five six seven eight nine ten 日本"},
]
#: Template expressions by the filter they apply.
FILTERS = {
    "abs": "-3 | abs", "attr": "messages[0].keys | attr('real') is undefined",
    "batch": "range(5) | batch(2, 'x') | list", "capitalize": "'grÜße' | capitalize",
    "center": "'a' | center(9)", "count": "messages | count", "d": "nothing | d('x')",
    "default": "nothing | default('x', true)",
    "dictsort": "{'b': 1, 'a': 2} | dictsort(reverse=true)", "e": "'<a> & \"b\"' | e",
    "escape": "'<a>' | escape", "filesizeformat": "123456789 | filesizeformat(true)",
    "first": "messages | first", "float": "'1.5e3' | float", "forceescape": "'<a>' | forceescape",
    "format": "'%s %05.2f %x %r' | format('a', 1.5, 255, 'é')",
    "groupby": "messages | groupby('role') | list", "indent": "'a\nb' | indent(3, true)",
    "int": "'0x1f' | int(0, 16)", "items": "{'a': 1} | items | list",
    "join": "messages | join(', ', attribute='role')", "last": "messages | last",
    "length": "messages | length", "list": "'abc' | list", "lower": "'ÀB' | lower",
    "map": "messages | map(attribute='content') | map('upper') | list", "max": "[1, 3, 2] | max",
    "min": "['b', 'A'] | min(case_sensitive=true)", "pprint": "messages | pprint",
    "reject": "[1, 2, 3] | reject('odd') | list",
    "rejectattr": "messages | rejectattr('role', 'eq', 'user') | list",
    "replace": "'aaa' | replace('a', 'b', 2)", "reverse": "'abc' | reverse",
    "round": "2.345 | round(2, 'ceil')", "safe": "'<a>' | safe",
    "select": "[1, 2, 3] | select('odd') | list",
    "selectattr": "messages | selectattr('role', 'equalto', 'user') | list",
    "slice": "range(5) | slice(2) | list", "sort": "['b', 'A', 'c'] | sort",
    "string": "1.5 | string", "striptags": "messages[0].content | striptags",
    "sum": "[1, 2.5] | sum", "title": "'one two-three' | title",
    "tojson": "messages | tojson(indent=2)", "trim": "' a ' | trim",
    "truncate": "messages[1].content | truncate(20)", "unique": "['a', 'A', 'b'] | unique | list",
    "upper": "'ß' | upper", "urlencode": "{'a b': 'é/&'} | urlencode",
    "urlize": "messages[0].content | urlize(20, true, target='_blank')",
    "wordcount": "messages[1].content | wordcount",
    "wordwrap": "messages[1].content | wordwrap(12)",
    "xmlattr": "{'a': '<b>', 'c': none} | xmlattr",
}  # fmt: skip
#: Filters with a random output.
RANDOM_FILTERS = {"random"}
TESTS = {
    "boolean": "true is boolean", "callable": "range is callable", "defined": "messages is defined",
    "divisibleby": "6 is divisibleby 3", "escaped": "'a' | e is escaped", "even": "2 is even",
    "false": "false is false", "filter": "'striptags' is filter", "float": "1.5 is float",
    "in": "'a' is in 'abc'", "integer": "1 is integer", "iterable": "messages is iterable",
    "lower": "'a' is lower", "mapping": "messages[0] is mapping", "none": "none is none",
    "number": "1.5 is number", "odd": "1 is odd", "sameas": "none is sameas none",
    "sequence": "messages is sequence", "string": "'a' is string", "test": "'odd' is test",
    "true": "true is true", "undefined": "nothing is undefined", "upper": "'A' is upper",
    **{name: f"1 is {name} 2" for name in ("eq", "equalto", "ne", "gt", "greaterthan")},
    **{name: f"1 is {name} 2" for name in ("ge", "lt", "lessthan", "le")},
}  # fmt: skip
GLOBALS = {
    "range": "range(1, 9, 3) | list",
    "dict": "dict(a=1, b='é')",
    "cycler": "cycler('a', 'b').next()",
    "joiner": "joiner(', ')()",
    "namespace": "namespace(a=1).a",
}
TEXTS = {
    "escapes": r"'\u65e5 \x41 \N{BULLET} \101'",
    "format": "'{0:>9} {a!r:.3} {b:,}'.format('é', a='xyzw', b=12345)",
    "percent": "'%(a)s %(b)08.3f %%' % {'a': 'x', 'b': 1.5}",
    "encodings": "'aé'.encode('utf-8') ~ 'aé'.encode('latin-1') ~ 'a'.encode('ascii')",
    "markup": "('<b>{}</b>' | safe).format('<i>') ~ ('<b>%s</b>' | safe) % '<i>'",
    "methods": "'a,b'.split(',') ~ 'ab'.partition('b') ~ 'a'.zfill(4) ~ 'ǅ'.swapcase()",
    "splitlines": "'a\nb\u2028c'.splitlines() | map('trim') | join('|')",
    "unescape": "('a &lt; b &eacute;' | safe).unescape()",
}
STATEMENTS = {
    "autoescape": "{% autoescape true %}{{ '<a>' ~ messages[0].content }}{% endautoescape %}",
    "call": "{% macro m(a) %}{{ a }}{{ caller(1) }}{% endmacro %}"
    "{% call(x) m(2) %}{{ x }}{% endcall %}",
    "filter": "{% filter striptags | upper %}<b>a</b>{% endfilter %}",
    "loop": "{% for m in messages recursive %}{{ loop.index }}{{ loop.changed(m.role) }}"
    "{% if loop.last %}{% break %}{% endif %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "set": "{% set a %}x{% endset %}{% set ns = namespace(b=a) %}{% set ns.b = 2 %}"
    "{{ a }}{{ ns.b }}",
    "with": "{% with a = 1 %}{{ a }}{% endwith %}{# no text #}{% raw %}{{ }}{% endraw %}",
}


def sources() -> dict[str, str]:
    expressions = {**TEXTS}
    for kind, cases in (("filter", FILTERS), ("test", TESTS), ("global", GLOBALS)):
        expressions |= {f"{kind} {name}": text for name, text in cases.items()}
    return {**{name: f"{{{{ {text} }}}}" for name, text in expressions.items()}, **STATEMENTS}


def test_every_filter_test_and_global_has_a_case() -> None:
    assert FILTERS.keys() | RANDOM_FILTERS == defaults.DEFAULT_FILTERS.keys()
    operators = {name for name in defaults.DEFAULT_TESTS if not name.isidentifier()}
    assert TESTS.keys() | operators == defaults.DEFAULT_TESTS.keys()
    assert GLOBALS.keys() | {"lipsum"} == defaults.DEFAULT_NAMESPACE.keys()


def test_every_feature_renders_as_in_transformers() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    cases = sources()
    assert len(cases) > 100
    # All cases render in a single process, so no case can rely on an import of another process.
    source = "\x1e".join(cases.values())
    expected = _compile_jinja_template(source).render(messages=CONVERSATION).split("\x1e")
    texts = ChatTemplate(source).render(CONVERSATION).split("\x1e")
    assert dict(zip(cases, texts, strict=True)) == dict(zip(cases, expected, strict=True))


@pytest.mark.parametrize("source", ["{{ 'a'.encode('idna') }}", "{{ 'a'.encode('cp037') }}"])
def test_unloaded_codec_is_refused_without_a_path(source: str) -> None:
    with pytest.raises(TemplateRefusal, match="unknown encoding") as refusal:
        ChatTemplate(source).render(CONVERSATION)
    assert "/" not in str(refusal.value)
