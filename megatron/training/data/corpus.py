# SPDX-License-Identifier: Apache-2.0
"""Text that every Python carries: its language reference and the sources of its standard library.

About 32 MB where the library's own tests are installed, 12 MB where they are not. Documents come in
an order that depends on the Python version only, shuffled, so that a validation split cut from the
end resembles the rest.
"""

from __future__ import annotations

import io
import json
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.datasets.atomic_file import atomic_write
from megatron.core.untrusted_files import open_regular

# Installed beside the standard library, but not part of it.
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}
# Holds the topics, which are documents of their own.
_TOPICS_SOURCE = Path("pydoc_data", "topics.py")


@dataclass(frozen=True, kw_only=True)
class CorpusStats:
    """What a corpus holds.

    Args:
        documents: topics and files.
        text_bytes: of all documents, in UTF-8.
        topics: documents of the language reference.
        unreadable_files: sources that are no text on purpose (the library tests its parser so).
        duplicates: files equal to an earlier document, or empty.
    """

    documents: int
    text_bytes: int
    topics: int
    unreadable_files: int
    duplicates: int


def standard_library() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _sources(folder: Path) -> Iterator[str | None]:
    """Yield each source file's text in the order of their names, None for one that is no text."""
    found = [
        path.relative_to(folder)
        for path in folder.rglob("*.py")
        if not _FOREIGN & set(path.relative_to(folder).parts)
    ]
    for path in sorted(found, key=lambda path: path.parts):
        if path == _TOPICS_SOURCE:
            continue
        try:
            with open_regular(folder / path, follow_links=True) as stream:
                encoding, _ = tokenize.detect_encoding(stream.readline)
                stream.seek(0)
                with io.TextIOWrapper(stream, encoding) as lines:
                    text = lines.read()
                text.encode()
        except (SyntaxError, UnicodeError, OSError):
            yield None
        else:
            yield text


def build_corpus(
    output: str | Path, *, seed: int = 1234, library: Path | None = None
) -> CorpusStats:
    """Write the corpus as JSON lines with the key `text`.

    Args:
        output: the file; it appears when it is complete.
        seed: order of the documents.
        library: folder of sources; None means this Python's standard library.

    Returns:
        What it holds.
    """
    topics = _topics()
    texts, seen = list(topics), set(topics)
    unreadable = duplicates = 0
    for text in _sources(standard_library() if library is None else library):
        if text is None:
            unreadable += 1
        elif not text.strip() or text in seen:
            duplicates += 1
        else:
            seen.add(text)
            texts.append(text)
    random.Random(seed).shuffle(texts)
    with atomic_write(Path(output)) as stream:
        for text in texts:
            stream.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
    return CorpusStats(
        documents=len(texts),
        text_bytes=sum(len(text.encode()) for text in texts),
        topics=len(topics),
        unreadable_files=unreadable,
        duplicates=duplicates,
    )
