# SPDX-License-Identifier: Apache-2.0
"""The corpus is the text of this Python's library, repeatable, with every file accounted for."""

import json
import random
from pydoc_data.topics import topics

import pytest

from megatron.training.quickstart import build_corpus, standard_library


@pytest.fixture
def library(tmp_path):
    """Create a folder like a standard library, with every kind of file found in one."""
    folder = tmp_path / "lib"
    for name, content in {
        "b.py": b"b = 1\n",
        "a.py": b"# -*- coding: latin-1 -*-\n\xe9 = 1\n",
        "package/__init__.py": b"",
        "package/copy.py": b"b = 1\n",
        "test/bad.py": b"\xff\xfe\x00",
        "site-packages/foreign.py": b"foreign = 1\n",
        "package/__pycache__/cached.py": b"cached = 1\n",
        "pydoc_data/topics.py": b"topics = {}\n",
        "notes.txt": b"notes\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def documents(path):
    return [json.loads(line)["text"] for line in path.read_bytes().splitlines()]


def test_every_file_is_a_document_or_accounted_for(tmp_path, library):
    stats = build_corpus(tmp_path / "corpus.jsonl", library=library)
    texts = documents(tmp_path / "corpus.jsonl")
    sources = {"b = 1\n", "# -*- coding: latin-1 -*-\né = 1\n"}
    assert set(texts) == sources | set(topics.values())
    assert stats.documents == len(texts) == len(topics) + 2
    assert (stats.topics, stats.unreadable_files, stats.duplicates) == (len(topics), 1, 2)
    assert stats.text_bytes == sum(len(text.encode()) for text in texts)


def test_order_is_shuffled_and_repeatable(tmp_path, library):
    corpus, same_seed, other_seed = (tmp_path / name for name in ["first", "again", "other"])
    build_corpus(corpus, library=library)
    build_corpus(same_seed, library=library)
    build_corpus(other_seed, library=library, seed=5)
    assert corpus.read_bytes() == same_seed.read_bytes()
    assert documents(corpus) != documents(other_seed)
    assert sorted(documents(corpus)) == sorted(documents(other_seed))
    in_order = [topics[name] for name in sorted(topics)]
    assert [text for text in documents(corpus) if text in topics.values()] != in_order


def test_validation_tail_resembles_the_corpus(tmp_path):
    # The validation split is the end of the corpus: its documents must not be all of one kind.
    build_corpus(tmp_path / "corpus.jsonl")
    texts = documents(tmp_path / "corpus.jsonl")
    assert len(texts) > 600
    assert sum(len(text) for text in texts) > 8_000_000
    tail = texts[-len(texts) // 10 :]
    average = sum(map(len, texts)) / len(texts)
    assert 0.5 < sum(map(len, tail)) / len(tail) / average < 2
    assert random.Random(0).choice(texts)
    assert (standard_library() / "os.py").read_text(encoding="utf-8") in texts
