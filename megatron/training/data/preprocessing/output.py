# SPDX-License-Identifier: Apache-2.0
"""Data sets written together, committed at intervals, and resumed after a kill.

At a commit the drafts of all streams are flushed to disk, then one line is appended to the journal:
how much of each draft counts, where in the input to go on, and what was rejected. A run that
resumes truncates the drafts to the last line. So every byte of the result is the same as without
the interruption.

The journal is lines of JSON, each synced to disk before the next is begun. The first line gives the
output and its inputs; every further one the progress. A line that a kill cut short does not count.
The journal is locked while a run writes it, and removed when the run's result is complete.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from megatron.core.datasets.atomic_file import atomic_write
from megatron.core.datasets.indexed_dataset import (
    IndexedDatasetWriter,
    Written,
    drop_draft,
    publish_draft,
    shuffle_draft,
)
from megatron.core.untrusted_files import open_to_write, parse_json, read_json
from megatron.training.data.documents import Position, Tally
from megatron.training.data.preprocessing.encoder import Encoded, Stream

#: Of a line; it names every input file.
MAX_LINE_BYTES = 64 << 20


class Journal:
    """A journal in a run's hands.

    Args:
        path: of the file; made if there is none.

    Raises:
        ValueError: another run has it.
        OSError: the file system refuses the file or a lock on it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = _locked(path)
        self._end = 0
        self.header: Mapping[str, Any] | None = None
        self.latest: Mapping[str, Any] | None = None
        for line in iter(lambda: self._stream.readline(MAX_LINE_BYTES), b""):
            try:
                found = parse_json(line) if line.endswith(b"\n") else None
            except ValueError:
                break
            if not isinstance(found, dict):
                break
            if self.header is None:
                self.header = found
            else:
                self.latest = found
            self._end += len(line)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Forget everything and write a first line."""
        self._end = 0
        self.append(header)
        self.header, self.latest = header, None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line and wait until the disk has it."""
        line = json.dumps(entry).encode() + b"\n"
        self._stream.seek(self._end)
        self._stream.truncate()
        self._stream.write(line)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._end += len(line)
        self.latest = entry

    def close(self) -> None:
        """Let go of the journal; it stays for another run."""
        self._stream.close()

    def remove(self) -> None:
        """Remove the journal."""
        self.path.unlink(missing_ok=True)
        self.close()


def _locked(path: Path) -> BinaryIO:
    while True:
        stream = open_to_write(path, "a+")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            raise ValueError(
                f"{path} is in use: another run is writing this data set; wait for it, or give "
                "another --output-prefix"
            ) from None
        # The run that had it before may have removed the file that was opened here.
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            stream.seek(0)
            return stream
        stream.close()


COMMIT_BYTES = 64 << 20
_DRAFT = "draft"
_SHUFFLED = "shuffled"
# Every file that a data set can have; the index comes last, since it makes the data set exist.
_SUFFIXES = (".mask.bin", ".mask.idx", ".json", ".bin", ".idx")


class Output:
    """The data sets of a run.

    Args:
        prefix: of all of them; its folder must exist.
        streams: what each is.
        header: what the result depends on: options and inputs, as JSON.
        resume: whether to go on with what a killed run left; nothing is left to do where a run
            with the same header has finished.
        overwrite: whether to replace data sets that exist.
        shuffle_seed: of the order of the documents; None keeps that of the input.
        commit_bytes: input to work off between commits.

    Raises:
        ValueError: another run writes them, they exist already, or what was left is of other
            options or inputs.
    """

    def __init__(
        self,
        prefix: str | Path,
        streams: Sequence[Stream],
        *,
        header: Mapping[str, Any],
        resume: bool,
        overwrite: bool = False,
        shuffle_seed: int | None = None,
        commit_bytes: int = COMMIT_BYTES,
    ) -> None:
        self._streams = tuple(streams)
        self._shuffle_seed = shuffle_seed
        self._prefixes = [f"{prefix}{stream.suffix}" for stream in streams]
        self._commit_bytes = commit_bytes
        self._uncommitted = 0
        self.position = Position()
        self.tally = Tally()
        self.complete = False
        self.made_from = hashlib.sha256(json.dumps(header).encode()).hexdigest()
        self._writers: list[IndexedDatasetWriter] = []
        self._journal = Journal(journal_path(prefix))
        try:
            latest = self._take_up(header, resume, overwrite)
            if not self.complete:
                self._open(streams, latest)
        except BaseException:
            # A journal without a first line is one that this run has made.
            self._journal.close() if self._journal.header else self._journal.remove()
            raise

    def _take_up(
        self, header: Mapping[str, Any], resume: bool, overwrite: bool
    ) -> Mapping[str, Any] | None:
        """Return the line of the journal to go on from; None to start anew."""
        known, latest = self._journal.header, self._journal.latest
        header = json.loads(json.dumps(header))  # tuples are lists in a journal
        if resume and known is not None and latest is not None:
            changed = [
                f"{name} was {known.get(name)} and is {header[name]}"
                for name in header
                if known.get(name) != header[name]
            ]
            if changed:
                raise ValueError(
                    f"--resume: {_short('; '.join(changed))}: undo that, or leave --resume out to "
                    "start anew"
                )
            self.complete = "complete" in latest
            if self.complete and not _fits(latest["complete"], self._prefixes):
                raise ValueError(_damaged(self._journal, "its descriptions are not of the streams"))
            return latest
        self._refuse_existing(resume, overwrite)
        if self.complete:
            return None
        for prefix in self._prefixes:
            drop_draft(prefix, _DRAFT)
            drop_draft(prefix, _SHUFFLED)
        self._journal.begin(header)
        return None

    def _refuse_existing(self, resume: bool, overwrite: bool) -> None:
        """Refuse to replace data sets without being asked to, or find them to be this run's."""
        existing = [f"{p}{s}" for p in self._prefixes for s in _SUFFIXES if Path(p + s).exists()]
        if resume and existing and self._finished() is not None:
            self.complete = True
        elif existing and not overwrite:
            other = " and was made from other options or inputs" if resume else ""
            raise ValueError(
                f"{existing[-1]} exists{other}: give another --output-prefix, or --overwrite to "
                "replace it"
            )

    def _finished(self) -> list[Mapping[str, Any] | None] | None:
        """Return the descriptions of data sets that a run with this header has finished."""
        found: list[Mapping[str, Any] | None] = []
        for prefix, stream in zip(self._prefixes, self._streams, strict=True):
            if not all(Path(f"{prefix}{end}").exists() for end in (".bin", ".idx")):
                return None
            if not stream.described:
                found.append(None)
                continue
            try:
                description = read_json(f"{prefix}.json", follow_links=True)
            except (OSError, ValueError):
                return None
            if not isinstance(description, dict) or description.get("made_from") != self.made_from:
                return None
            found.append(description)
        return found

    def _open(self, streams: Sequence[Stream], latest: Mapping[str, Any] | None) -> None:
        written: list[Written | None] = [None] * len(streams)
        if latest is not None:
            try:
                self.position = Position(**_counts(latest["position"]))
                self.tally = _tally(latest["tally"])
                written = [Written(**_counts(counts)) for counts in latest["written"]]
                if len(written) != len(streams):
                    raise TypeError(f"{len(written)} data sets, not {len(streams)}")
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(_damaged(self._journal, f"{error}")) from None
        for prefix, stream, counts in zip(self._prefixes, streams, written, strict=True):
            self._writers.append(
                IndexedDatasetWriter(prefix, stream.dtype, draft=_DRAFT, written=counts)
            )

    @property
    def written(self) -> list[Written]:
        """Return how much each data set holds so far."""
        return [
            Written(tokens=w.num_tokens, sequences=w.num_sequences, documents=w.num_documents)
            for w in self._writers
        ]

    def add(self, encoded: Encoded) -> None:
        """Append the documents of a block, and commit from time to time."""
        for writer, tokens, lengths in zip(
            self._writers, encoded.tokens, encoded.lengths, strict=True
        ):
            writer.add_documents(tokens, lengths)
        self.tally.add(encoded.tally)
        self.position = encoded.end
        self._uncommitted += encoded.size
        if self._uncommitted >= self._commit_bytes:
            self._journal.append(
                {
                    "position": asdict(self.position),
                    "tally": {**vars(self.tally), "rejected": dict(self.tally.rejected)},
                    "written": [asdict(writer.commit()) for writer in self._writers],
                }
            )
            self._uncommitted = 0

    def finish(self, descriptions: Sequence[Mapping[str, Any] | None]) -> None:
        """Bring everything to the disk: only names are left to be given, by `publish`.

        Args:
            descriptions: of each stream, for `<prefix>.json`; None for no such file.
        """
        for writer, prefix in zip(self._writers, self._prefixes, strict=True):
            if self._shuffle_seed is None:
                writer.prepare()
            else:
                writer.commit()
                writer.keep()
                shuffle_draft(
                    prefix, writer.dtype, draft=_DRAFT, into=_SHUFFLED, seed=self._shuffle_seed
                )
        # From here on only names change, and a run that resumes changes them likewise.
        self._journal.append({"complete": list(descriptions)})
        self.complete = True

    def publish(self) -> list[Mapping[str, Any] | None]:
        """Give every data set its name and its description, and forget the journal.

        Returns:
            The descriptions.
        """
        if self._journal.latest is None:  # a run before this one has finished
            finished = self._finished()
            assert finished is not None
            self._journal.remove()
            return finished
        descriptions = self._journal.latest["complete"]
        self._remove_stale()
        # The first stream last: where its index is, everything is.
        for prefix, description in reversed(list(zip(self._prefixes, descriptions, strict=True))):
            # Before the pair's names: where there is an index, there is its description.
            if description is not None:
                target = Path(f"{prefix}.json")
                for left in target.parent.glob(f"{glob.escape(target.name)}.*.tmp"):
                    left.unlink()  # of a run that was killed here; no other has the journal
                with atomic_write(target) as stream:
                    stream.write(json.dumps(description, indent=1).encode() + b"\n")
            publish_draft(prefix, _DRAFT if self._shuffle_seed is None else _SHUFFLED)
            drop_draft(prefix, _DRAFT)
        self._journal.remove()
        return descriptions

    def _remove_stale(self) -> None:
        """Remove what the data sets that are replaced have and these have not, e.g. a mask."""
        written = {f"{prefix}{end}" for prefix in self._prefixes for end in (".bin", ".idx")}
        for prefix in self._prefixes:
            for path in (f"{prefix}{suffix}" for suffix in _SUFFIXES[:2]):
                if path not in written:
                    Path(path).unlink(missing_ok=True)

    def stop(self, *, keep: bool) -> bool:
        """End before the work is done.

        Args:
            keep: whether a run that resumes shall find what is committed.

        Returns:
            Whether it will find anything.
        """
        kept = self.complete or (keep and "position" in (self._journal.latest or {}))
        for writer in self._writers:
            writer.keep() if kept else writer.abort()
        if not self.complete:
            for prefix in self._prefixes:
                drop_draft(prefix, _SHUFFLED)
        self._journal.close() if kept else self._journal.remove()
        return kept


def journal_path(prefix: str | Path) -> Path:
    """Return the path of the journal of the data sets under a prefix."""
    return Path(f"{prefix}.journal")


def _fits(descriptions: Any, prefixes: Sequence[str]) -> bool:
    """Tell whether a journal has a description, or none, of every data set."""
    return (
        isinstance(descriptions, list)
        and len(descriptions) == len(prefixes)
        and all(found is None or isinstance(found, dict) for found in descriptions)
    )


def _counts(fields: Mapping[str, Any]) -> Mapping[str, int]:
    """Return fields of a journal that must be counts. Raises TypeError."""
    for name, value in fields.items():
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise TypeError(f"{name} is {str(value)[:40]!r}")
    return fields


def _damaged(journal: Journal, why: str) -> str:
    return f"--resume: {journal.path} is damaged ({why}): leave --resume out to start anew"


def _tally(values: Mapping[str, Any]) -> Tally:
    return Tally(
        **_counts({name: values[name] for name in ("documents", "read_bytes")}),
        rejected=Counter(_counts(values["rejected"])),
        examples={str(reason): str(place) for reason, place in values["examples"].items()},
        strict=values["strict"] is True,
    )


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
