# SPDX-License-Identifier: Apache-2.0
"""Files as an attacker, a full disk or a failed copy would leave them, drawn from a seed.

`spoil` replaces a valid file: by bytes that were flipped, cut, repeated or appended; by JSON with a
changed value, a value of another type, a missing or repeated key, huge numbers or deep nesting;
by a pipe, a folder, a link or a sparse file of gigabytes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: More than the memory limit of a trial, and more than a trial can read in its time.
SPARSE_BYTES = 3 << 30

#: JSON texts that a reader may not expect.
VALUES = (
    *("null", "true", "false", "-1", "0", "1", "3", "1.5", "-0.0", "1e308", "1e999", "-1e999"),
    *("NaN", "Infinity", "1" * 30, "1" * 5000, str(1 << 30), str(1 << 31), str((1 << 63) - 1)),
    *(str(1 << 63), str(1 << 64), "-" + str(1 << 63), '""', '"a"', '" "', '"\\u0000"'),
    *('"\\ud800"', '"\\u001b[2J\\u0007"', '"../../../../etc/passwd"', '"/dev/zero"', '"."', '".."'),
    *('"' + "x" * 100_000 + '"', '"' + "9" * 40 + '"', '"1e400"', "[]", "{}", "[null]", "[-1]"),
    *('["a"]', "[[]]", '{"":0}', '{"a":{"a":{"a":null}}}', "[0,0,0,0]", "[1,2]", '["", 1]'),
    *("[" * 40 + "]" * 40, "[" * 900 + "]" * 900, "[" * 60_000 + "]" * 60_000),
    *('{"a":' * 900 + "1" + "}" * 900, "[" * 60_000, "[" + "0," * 100_000 + "0]"),
    *("{" + ",".join(f'"{i}":{i}' for i in range(20_000)) + "}",),
)


class _Raw(str):
    """JSON text that replaces a value."""


class _Pairs(list):
    """The members of an object, in order; a name may occur twice."""


def spoil(path: Path, rng: random.Random, *, text: Callable[..., bytes], seal: Any = None) -> str:
    """Replace a valid file by a hostile one; return the kind of damage.

    Args:
        path: path of the valid file.
        rng: source of the random choices.
        text: makes hostile content in the file's format from (content, rng).
        seal: recomputes the digest of changed content; None for a format without digest.
    """
    draw = rng.random()
    if draw < 0.12:
        name = rng.choice(sorted(REPLACEMENTS))
        content = path.read_bytes()
        path.unlink()
        REPLACEMENTS[name](path, content)
        return name
    content = path.read_bytes()
    if draw < 0.35:
        spoiled = content
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            spoiled = _spoiled_bytes(spoiled, rng)
        how = "bytes"
    else:
        spoiled, how = text(content, rng), "content"
    if seal is not None and rng.random() < 0.9:
        spoiled = seal(spoiled)
    path.write_bytes(spoiled)
    return how


def _spoiled_bytes(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return rng.randbytes(8)
    at = rng.randrange(len(content))
    to = min(len(content), at + rng.choice((1, 4, 8, 64, 1000)))
    kind = rng.randrange(9)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[at:]
    if kind == 2:
        return content[:at] + content[to:]
    if kind == 3:
        return content[:to] + content[at:to] * rng.choice((1, 2, 1000)) + content[to:]
    if kind == 4:
        flipped = bytearray(content)
        for _ in range(rng.choice((1, 1, 8, 100))):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 5:
        noise = rng.choice((b"\0", b"\xff", b"\x1b[2J", b"\n", b"\r", b'"', b"[", b"\xed\xa0\x80"))
        return content[:at] + noise * rng.choice((1, 8, 4096)) + content[to:]
    if kind == 6:
        return content + rng.choice((b"\0", b"}", b"x" * 5000, content))
    if kind == 7:
        return rng.randbytes(len(content))
    return spoiled_words(content, rng)


def spoiled_words(content: bytes, rng: random.Random) -> bytes:
    """Write extreme integers into a binary file."""
    spoiled = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        form = rng.choice(("<q", "<Q", "<i", "<I", "<H"))
        size = struct.calcsize(form)
        if len(spoiled) < size:
            break
        last_start = min(len(spoiled), rng.choice((64, 512, len(spoiled)))) - size
        at = rng.randint(0, last_start) // size * size if last_start >= 0 else 0
        top = 8 * size - form[1].islower()
        number = rng.choice((0, 1, (1 << top) - 1, 1 << (top - 1), 1 << (top // 2), 255))
        spoiled[at : at + size] = struct.pack(form, number)
    return bytes(spoiled)


def spoiled_json(content: bytes, rng: random.Random, inside: tuple[str, ...] = ()) -> bytes:
    """Change some values of a JSON text.

    Args:
        inside: path of keys to the object that is changed.
    """
    try:
        return _spoiled_tree(json.loads(content, object_pairs_hook=_Pairs), rng, inside)
    except (ValueError, RecursionError):  # it has been spoiled before
        return content


def _spoiled_tree(tree: Any, rng: random.Random, inside: tuple[str, ...]) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        subtree = tree
        for name in inside:
            subtree = next(value for key, value in subtree if key == name)
        if not isinstance(subtree, list) or isinstance(subtree, _Raw):
            break
        tree = _changed(tree, subtree, rng)
    return _dump(tree).encode("utf-8", "surrogatepass")


def _changed(tree: Any, subtree: Any, rng: random.Random) -> Any:
    holders = list(_holders(subtree))
    if not holders:
        return tree
    # Small lists of numbers would take most draws of a uniform choice.
    holder = rng.choice(rng.choice(([*holders[:1]], holders, holders)))
    at = rng.randrange(len(holder))
    value = _Raw(rng.choice(VALUES))
    named = isinstance(holder, _Pairs)
    kind = rng.randrange(10)
    if kind < 6:
        holder[at] = (holder[at][0], value) if named else value
    elif kind == 6:
        del holder[at]
    elif kind == 7 and named:
        holder.append((holder[at][0], value))
    elif kind == 8:
        other_index = rng.randrange(len(holder))
        if named:
            holder[at], holder[other_index] = (
                (holder[at][0], holder[other_index][1]),
                (holder[other_index][0], holder[at][1]),
            )
        else:
            holder[at] = holder[other_index]
    elif named:
        holder[at] = (json.loads(rng.choice(_NAMES)), holder[at][1])
    else:
        return _Raw(rng.choice(VALUES)) if subtree is tree else tree
    return tree


_NAMES = tuple(value for value in VALUES if value.startswith('"'))


def _holders(subtree: Any) -> Iterator[Any]:
    """Yield every object and list that is not empty."""
    if isinstance(subtree, list) and subtree:
        yield subtree
        for inner in subtree:
            yield from _holders(inner[1] if isinstance(subtree, _Pairs) else inner)


def _dump(value: Any) -> str:
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, _Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{_dump(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dump, value)) + "]"
    return json.dumps(value)


def spoiled_lines(content: bytes, rng: random.Random) -> bytes:
    """Change some lines of a JSON Lines text."""
    lines = content.splitlines()
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind < 3 and lines[at].startswith(b"{"):
            changed = spoiled_json(lines[at], rng)
            lines[at] = changed if rng.random() < 0.9 else _spoiled_bytes(changed, rng)
        elif kind == 3:
            lines[at] = rng.choice(VALUES).encode()
        else:
            lines[at] = _spoiled_bytes(lines[at], rng)
    return b"\n".join(lines) + rng.choice((b"\n", b""))


def spoiled_header(content: bytes, rng: random.Random) -> bytes:
    """Change the JSON header of a safetensors file, or its length."""
    (length,) = struct.unpack("<Q", content[:8])
    header = spoiled_json(content[8 : 8 + length], rng)
    stated_length = (
        len(header) if rng.random() < 0.8 else rng.choice((0, 1, length, 1 << 62, (1 << 64) - 1))
    )
    return struct.pack("<Q", stated_length) + header + content[8 + length :]


def spoiled_yaml(content: bytes, rng: random.Random) -> bytes:
    """Change some lines of `name: value`."""
    lines = content.decode().splitlines()
    values = (
        *VALUES,
        *("!!python/object/apply:os.system [id]", "!!binary aGVsbG8=", "&a [*a, *a]", "*nothing"),
        *("2024-01-01", "0x7fffffffffffffffffff", "1:30", "0o777", ".inf", ".nan", "~", "<<: {}"),
        *(
            "|\n " + "x\n " * 1000,
            "? [a]\n: b",
            "${HOME}",
            "${NOTHING}",
            "'\\0'",
            '"\\x1b[2J"',
            "@",
        ),
        *("a: b: c", "- - - - 1", "%", "\t", "[" * 5000, "{a: " * 500, "!<x> 1", "--- 1\n--- 2"),
    )
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        name = lines[at].partition(":")[0]
        kind = rng.randrange(5)
        if kind < 3:
            lines[at] = f"{name}: {rng.choice(values)}"
        elif kind == 3:
            lines.insert(at, f"{name}: {rng.choice(values)}")
        else:
            lines[at] = rng.choice(values)
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


_SNIPPETS = (
    *("{{ 1 / 0 }}", "{{ messages[99].content.x }}", "{{ 'a' | center(10000000000) }}"),
    *("{{ '%9999999999d' | format(1) }}", "{{ '{:99999999999}'.format(1) }}"),
    *("{{ ('a' * 1000000) | list | length }}", "{{ 9 ** 99 }}"),
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% set n = namespace(a='aa') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{% set ns = namespace(a=9) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    *("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('\x1b[2J') }}"),
    *("{% include '/etc/passwd' %}", "{% import 'os' as os %}"),
    "{{ messages | map(attribute='content') | join(' ') | urlize }}",
    *("{{ messages | tojson(indent=99999) }}", "{{ 'a' | indent(99999999) }}"),
    *("{{ 'a b ' | wordwrap(0) }}", "{{ range(99999) | batch(1) | list | string | length }}"),
    *("{{ [[[1]]] | sum(start=[]) }}", "{{ messages | groupby('role') | dictsort }}"),
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    *("{% call(x) f() %}{% endcall %}", "{{ self.__init__.__globals__ }}", "{{ cycler().next() }}"),
    *("{{ joiner(1)() }}", "{{ 'é' | string | urlencode | e | upper | reverse }}"),
    *("{{ 'a'.encode('idna') }}", "{{ 'a' | xmlattr }}", "{{ {'a': 1} | xmlattr }}"),
    *("{% generation %}{{ messages[0].content }}{% endgeneration %}", "{% generation %}"),
    *("{% endfor %}", "{#", "{{", "{{ eos_token }}{{ bos_token }}{{ nothing }}", "\x00"),
    *("\ue0f0\ue0f1\ue0f2", "\u202e"),
)


def spoiled_template(content: bytes, rng: random.Random) -> bytes:
    """Return a Jinja template with costly and forbidden snippets."""
    text = content.decode()
    for _ in range(rng.choice((1, 1, 2, 4))):
        snippet = rng.choice(_SNIPPETS)
        kind, times = rng.randrange(6), rng.choice((1, 30, 3000))
        if kind == 0:
            snippet = "{% if 1 %}" * times + snippet + "{% endif %}" * times
        elif kind == 1:
            snippet = "{% for i in range(2) %}" * min(times, 30) + snippet + "{% endfor %}" * times
        elif kind == 2:
            snippet = "{{ " + "(" * times + "1" + ")" * times + " }}" + snippet
        elif kind == 3:
            snippet *= times
        at = rng.choice((0, len(text), rng.randrange(len(text) + 1)))
        text = text[:at] + snippet + text[at:]
    return text.encode("utf-8", "surrogatepass")


def _pipe(path: Path, content: bytes) -> None:
    os.mkfifo(path)


def _link(path: Path, target: Path | str) -> None:
    path.symlink_to(target)


def _outside(path: Path, content: bytes) -> None:
    outside = path.parents[1] / "outside"
    outside.write_bytes(content)
    path.symlink_to(outside)


def _sparse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.truncate(path, SPARSE_BYTES)


def _socket(path: Path, content: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        short = Path(f"/proc/self/fd/{(fd := os.open(path.parent, os.O_RDONLY))}") / path.name
        end.bind(str(short))
        os.close(fd)


#: What may lie in the place of a file, by name.
REPLACEMENTS: dict[str, Callable[[Path, bytes], None]] = {
    "pipe": _pipe,
    "folder": lambda path, content: path.mkdir(),
    "broken link": lambda path, content: _link(path, "nothing"),
    "link to itself": lambda path, content: _link(path, path.name),
    "link to a device": lambda path, content: _link(path, "/dev/zero"),
    "link outside": _outside,
    "sparse": _sparse,
    "socket": _socket,
    "empty": lambda path, content: path.touch(),
    "gone": lambda path, content: None,
}


def fresh_copy(base: Path, folder: Path) -> Path:
    """Replace `folder` by a copy of `base`; return the copy."""
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(base, folder / "case", symlinks=True))
