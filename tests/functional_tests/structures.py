# SPDX-License-Identifier: Apache-2.0
"""Files of valid structure at any size: deep, wide, many, overlapping, sparse.

Valid files, which a reader accepts or refuses only after reading them, find costs that grow faster
than the file better than damaged files do. Each structure fills about the requested number of
bytes; a seed determines numbers and names.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.functional_tests.hostile_kinds import KINDS
from tests.support.hostile_files import fresh_copy
from tests.support.read_limits import ReadLimits, measure_read, read_faults
from tests.support.torch_archives import archive, description, metadata, numbers

#: Makes the content of a file from a generator, its approximate size, and the valid content.
Make = Callable[[random.Random, int, bytes], bytes]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A file of generated structure.

    Args:
        kind: key of `hostile_kinds.KINDS`, which names the folder, the file and its readers.
        make: makes the file's content.
        max_bytes: largest size that is not refused for its size alone.
        library_bytes: memory that a library takes for each byte of the file, besides the reader's.
        document_bytes: longest document of a text; longer documents are refused or split.
    """

    kind: str
    make: Make
    max_bytes: int = 1 << 30
    library_bytes: int = 0
    document_bytes: int = 0

    def limits(self, path: Path) -> ReadLimits:
        """Return the limits of reading the file."""
        size = path.stat().st_size
        parsed = size + self.document_bytes
        limits = ReadLimits.of(size + self.document_bytes, metadata_bytes=parsed)
        library_memory = self.library_bytes * size
        return dataclasses.replace(limits, memory_bytes=limits.memory_bytes + library_memory)


def structure_faults(root: Path, scratch: Path, name: str, *, seed: int, size: int) -> list[str]:
    """Read a structure, and a valid file of its kind with the same reader.

    Args:
        root: folder that contains the valid folders.
        scratch: folder for copies.
        name: name of the structure.
        seed: seed of its random numbers.
        size: approximate size of the file in bytes.

    Returns:
        The problems of the read; see `read_faults`.
    """
    structure = STRUCTURES[name]
    kind, rng = KINDS[structure.kind], random.Random(f"{name} {seed}")
    reader = rng.choice(kind.readers)
    np.random.seed(0)
    trivial = measure_read(partial(reader, fresh_copy(root / kind.base, scratch)))
    assert trivial.code == 0, trivial.text
    folder = fresh_copy(root / kind.base, scratch)
    path = (folder / kind.file).resolve()
    path.write_bytes(structure.make(rng, min(size, structure.max_bytes), path.read_bytes()))
    limits = structure.limits(path)
    return read_faults(measure_read(partial(reader, folder), limits), limits, trivial)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _changed(content: bytes, **fields: Any) -> bytes:
    return _json({**json.loads(content), **fields})


def _word(rng: random.Random) -> str:
    return "".join(rng.choices("abcdefgh", k=rng.randint(1, 12)))


def _fill(size: int, make: Callable[[int], str]) -> Iterator[str]:
    """Yield numbered texts until they have `size` characters."""
    number = filled = 0
    while filled < size:
        text = make(number)
        yield text
        number, filled = number + 1, filled + len(text) + 3


# JSON objects with many unused values.


def wide_json(rng: random.Random, size: int, content: bytes) -> bytes:
    """Add many fields with numbers."""
    names = _fill(size, lambda i: f"{_word(rng)}{i}")
    return _changed(content, **{name: i for i, name in enumerate(names)})


def many_small_objects(rng: random.Random, size: int, content: bytes) -> bytes:
    """Add a list of the smallest values that allocate memory."""
    value = rng.choice(({}, [], [0], {"a": 0}, "ab", 1.5, 1 << 40))
    return _changed(content, more=[value] * (size // len(_json(value) + b",")))


def deep_json(rng: random.Random, size: int, content: bytes) -> bytes:
    """Add many values at the largest depth that is read."""
    depth = rng.randint(30, 60)
    left, right = rng.choice((("[", "]"), ('{"a":', "}")))
    value = left * depth + "0" + right * depth
    nested = "[" + ",".join([value] * max(1, size // len(value))) + "]"
    return content.rstrip()[:-1] + b',"more":' + nested.encode() + b"}"


def many_files(rng: random.Random, size: int, content: bytes) -> bytes:
    """Put every tensor of an index of weights into a separate file."""
    files = {f"model.layers.{i}.x": f"{i}.safetensors" for i in range(size // 40)}
    return _changed(content, weight_map=files)


# safetensors


def many_tensors(rng: random.Random, size: int, content: bytes) -> bytes:
    """Add tensors without elements, with several dimensions."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    shape = [rng.choice((1, 1 << 40)) for _ in range(rng.randint(0, 7))] + [0]
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
    entry_bytes = len(_json(entry)) + 30
    pattern = rng.choice(("model.layers.{}.x", "model.layers.0.mlp.experts.{}.down_proj.weight"))
    table = _json({**{pattern.format(i): entry for i in range(size // entry_bytes)}, **header})
    return struct.pack("<Q", len(table)) + table + content[8 + length :]


# torch.distributed.checkpoint


def many_stored(rng: random.Random, size: int, content: bytes) -> bytes:
    """Describe many tensors: whole ones, empty ones, of many dimensions."""
    length = len(archive(description(numbers([4]), numbers([1]), count=4), bytes(16)))
    shape = rng.choice(([4], [0], [0] * 8, []))
    begin = rng.choice((0, length))
    chunk = ([0] * len(shape), shape, begin, rng.choice((0, 1)))
    return metadata({f"layers.{i}.{_word(rng)}": (shape, [chunk]) for i in range(size // 250)})


def many_chunks(rng: random.Random, size: int, content: bytes) -> bytes:
    """Describe a tensor of many chunks: rows, columns, or a grid."""
    count = max(4, size // 140)
    side = max(2, int(count**0.5))
    kind = rng.choice(("rows", "columns", "grid"))
    if kind == "grid":
        shape = [4 * side, 4 * side]
        boxes = [([4 * i, 4 * j], [4, 4]) for i in range(side) for j in range(side)]
    elif kind == "rows":
        shape, boxes = [count, 4], [([i, 0], [1, 4]) for i in range(count)]
    else:
        shape, boxes = [4, count], [([0, i], [4, 1]) for i in range(count)]
    return metadata({"a": (shape, [(offsets, sizes, 0, 0) for offsets, sizes in boxes])})


# Token files: an index of S sequences and D - 1 documents.


def many_empty_sequences(rng: random.Random, size: int, content: bytes) -> bytes:
    """Add sequences or documents without tokens to an index."""
    _, _, code, sequences, entries = struct.unpack("<9sQBQQ", content[:34])
    lengths, tail = content[34 : 34 + 4 * sequences], content[34 + 4 * sequences :]
    offsets, documents = (
        tail[: 8 * sequences],
        tail[8 * sequences : 8 * (sequences + entries)],
    )
    count = size // 20
    end = struct.unpack("<q", offsets[-8:])[0] + struct.unpack("<i", lengths[-4:])[0] * 2
    if rng.random() < 0.5:  # documents only
        added_documents = documents[-8:] * (2 * count)
        head = struct.pack("<9sQBQQ", content[:9], 1, code, sequences, entries + 2 * count)
        return head + lengths + offsets + documents + added_documents
    rising = np.arange(sequences + 1, sequences + 1 + count, dtype="<i8").tobytes()
    head = struct.pack("<9sQBQQ", content[:9], 1, code, sequences + count, entries + count)
    return (
        head + lengths + bytes(4 * count) + offsets + struct.pack("<q", end) * count
        + documents + rising
    )  # fmt: skip


# Texts


def json_lines(make: Callable[[random.Random, int], Any]) -> Make:
    """Return a function that writes lines of JSON objects."""

    def write(rng: random.Random, size: int, content: bytes) -> bytes:
        return b"\n".join(line.encode() for line in _fill(size, lambda i: json.dumps(make(rng, i))))

    return write


def one_long_line(rng: random.Random, size: int, content: bytes) -> bytes:
    """Write one document."""
    return _json({"text": "word " * (size // 5)})


def packed(make: Make) -> Make:
    """Return a function that compresses lines."""
    return lambda rng, size, content: gzip.compress(make(rng, size, gzip.decompress(content)))


def long_template(rng: random.Random, size: int, content: bytes) -> bytes:
    """Write many statements, or deep ones."""
    sound = content.decode()
    kind = rng.randrange(4)
    if kind == 0:
        addition = "".join(_fill(size, lambda i: f"{{% if messages[{i}] %}}{i}{{% endif %}}"))
    elif kind == 1:
        addition = "".join(
            _fill(size, lambda i: f"{{% macro m{i}(a) %}}{{{{ a }}}}{{% endmacro %}}")
        )
    elif kind == 2:
        depth = rng.randint(5, 18)
        addition = "{% if 1 %}" * depth + "{{ 1 }}" * (size // 7) + "{% endif %}" * depth
    else:
        addition = "{{ '" + "x" * size + "' | length }}"
    return (sound + addition).encode()


def long_yaml(rng: random.Random, size: int, content: bytes) -> bytes:
    """Add long lists, long texts or many unknown options."""
    kind = rng.randrange(3)
    if kind == 0:
        addition = "data-path: [" + ", ".join(_fill(size, lambda i: f"a{i}")) + "]"
    elif kind == 1:
        addition = "\n".join(_fill(size, lambda i: f"unknown-{i}: {i}"))
    else:
        addition = 'load: "' + "x" * size + '"'
    return content + addition.encode() + b"\n"


# Tokenizers


def large_vocabulary(rng: random.Random, size: int, content: bytes) -> bytes:
    """Give BPE many tokens and merges."""
    tree = json.loads(content)
    model, merges = tree["model"], []
    for i in range(size // 45):
        model["vocab"][f"{i}x"] = 2 * i + 100
        model["vocab"][f"a{i}x"] = 2 * i + 101
        merges.append(["a", f"{i}x"])
    model["merges"] = merges
    return _json(tree)


def many_added_tokens(rng: random.Random, size: int, content: bytes) -> bytes:
    """Add tokens to a tokenizer: many, or long ones."""
    tree = json.loads(content)
    text = rng.choice((1, 300)) * "y"
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    entry = {**flags, "special": True}
    count = size // (len(_json(entry)) + len(text) + 30)
    tree["added_tokens"] += [{"id": 50 + i, "content": f"{text}{i}", **entry} for i in range(count)]
    return _json(tree)


def many_ranks(rng: random.Random, size: int, content: bytes) -> bytes:
    """Add tokens to ranks by line."""
    num_ranks = len(content.splitlines())
    lines = _fill(
        size, lambda i: f"{base64.b64encode(f'token {i}'.encode()).decode()} {num_ranks + i}"
    )
    return content + "".join(line + "\n" for line in lines).encode()


_MESSAGE = {"role": "user", "content": "a"}

STRUCTURES: dict[str, Structure] = {
    **{
        f"{make.__name__} in {kind}": Structure(kind=kind, make=make, max_bytes=10 << 20)
        for kind in (
            *("config.json", "generation_config.json", "tokenizer_config.json"),
            *("index of weights", "description of tokens"),
        )
        for make in (wide_json, many_small_objects, deep_json)
    },
    "files": Structure(kind="index of weights", make=many_files, max_bytes=15 << 20),
    "tensors": Structure(kind="safetensors", make=many_tensors, max_bytes=7 << 20),
    "stored tensors": Structure(kind="torch's metadata", make=many_stored),
    "chunks": Structure(kind="torch's metadata", make=many_chunks),
    "sequences": Structure(kind="token index", make=many_empty_sequences),
    "texts": Structure(kind="JSON lines", make=json_lines(lambda rng, i: {"text": _word(rng)})),
    "long text": Structure(kind="JSON lines", make=one_long_line),
    "compressed text": Structure(
        kind="compressed lines", make=packed(one_long_line), document_bytes=16 << 20
    ),
    "compressed texts": Structure(
        kind="compressed lines", make=packed(json_lines(lambda rng, i: {"text": "a a a a"}))
    ),
    "turns": Structure(
        kind="chats",
        make=json_lines(
            lambda rng, i: {"messages": [_MESSAGE] * 50 + [{**_MESSAGE, "role": "assistant"}]}
        ),
    ),
    "statements": Structure(kind="chat template", make=long_template, max_bytes=900_000),
    "YAML": Structure(kind="YAML", make=long_yaml, max_bytes=250_000),
    # The library's tables of a vocabulary of short tokens, and Python's table of ids.
    "vocabulary": Structure(
        kind="tokenizer.json", make=large_vocabulary, max_bytes=60 << 20, library_bytes=24
    ),
    "added tokens": Structure(kind="tokenizer.json", make=many_added_tokens, max_bytes=60 << 20),
    # The library needs a dict of ranks by token bytes.
    "ranks": Structure(
        kind="tiktoken ranks", make=many_ranks, max_bytes=60 << 20, library_bytes=12
    ),
}
