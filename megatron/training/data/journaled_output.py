# SPDX-License-Identifier: Apache-2.0
"""Data sets written together, committed at intervals, and resumed after a kill.

A commit flushes the drafts of all streams to disk, then appends one line to the journal: the
committed length of each draft, the position in the input, and the rejected records. A resumed run
truncates the drafts to the lengths in the last line, so the result is bit for bit the same as
without the interruption.

The journal consists of JSON lines, each synced to disk before the next one is written. The first
line has the options and inputs; every further line has the progress. An incomplete line is ignored.
The journal is locked while a run writes it, and removed when the result is complete.
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

from megatron.core.datasets.indexed_dataset import (
    IndexedDatasetWriter,
    Written,
    drop_draft,
    publish_draft,
    shuffle_draft,
)
from megatron.core.untrusted_files import atomic_write, open_to_write, parse_json, read_json
from megatron.training.data.documents import Position, Tally
from megatron.training.data.encoder import Encoded, Stream

#: Longest line of a journal; the header names every input file.
MAX_LINE_BYTES = 64 << 20


class Journal:
    """An open, locked journal.

    Args:
        path: path of the file; created if it does not exist.

    Raises:
        ValueError: another run has locked it.
        OSError: the file system does not allow the file or a lock on it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = _open_locked(path)
        self._end = 0
        self.header: Mapping[str, Any] | None = None
        self.latest: Mapping[str, Any] | None = None
        for line in iter(lambda: self._stream.readline(MAX_LINE_BYTES), b""):
            try:
                entry = parse_json(line) if line.endswith(b"\n") else None
            except ValueError:
                break
            if not isinstance(entry, dict):
                break
            if self.header is None:
                self.header = entry
            else:
                self.latest = entry
            self._end += len(line)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Discard all lines and write the header."""
        self._end = 0
        self.append(header)
        self.header, self.latest = header, None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append a line and sync it to disk."""
        line = json.dumps(entry).encode() + b"\n"
        self._stream.seek(self._end)
        self._stream.truncate()
        self._stream.write(line)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._end += len(line)
        self.latest = entry

    def close(self) -> None:
        """Close and unlock the journal; the file remains for a resumed run."""
        self._stream.close()

    def remove(self) -> None:
        """Delete the journal."""
        self.path.unlink(missing_ok=True)
        self.close()


def _open_locked(path: Path) -> BinaryIO:
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
        # The previous owner may have deleted the file after it was opened here.
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            stream.seek(0)
            return stream
        stream.close()


COMMIT_BYTES = 64 << 20
_DRAFT = "draft"
_SHUFFLED = "shuffled"
# All files of a data set. The index is last: a data set exists once its index does.
_SUFFIXES = (".mask.bin", ".mask.idx", ".json", ".bin", ".idx")


class Output:
    """The data sets of a run.

    Args:
        prefix: common path prefix; its folder must exist.
        streams: one for each data set.
        header: options and inputs that determine the result, as JSON.
        resume: whether to continue a killed run; the output is already complete if a run with the
            same header has finished.
        overwrite: whether to replace existing data sets.
        shuffle_seed: seed of the document order; None keeps the order of the input.
        commit_bytes: input bytes between commits.

    Raises:
        ValueError: another run writes the data sets, they exist already, or the killed run had
            other options or inputs.
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
            latest = self._resume_or_begin(header, resume, overwrite)
            if not self.complete:
                self._open(streams, latest)
        except BaseException:
            # A journal without a header was created by this run.
            self._journal.close() if self._journal.header else self._journal.remove()
            raise

    def _resume_or_begin(
        self, header: Mapping[str, Any], resume: bool, overwrite: bool
    ) -> Mapping[str, Any] | None:
        """Return the journal line to resume from; None to start from scratch."""
        saved_header, latest = self._journal.header, self._journal.latest
        header = json.loads(json.dumps(header))  # JSON turns tuples into lists
        if resume and saved_header is not None and latest is not None:
            changed = [
                f"{name} was {saved_header.get(name)} and is {header[name]}"
                for name in header
                if saved_header.get(name) != header[name]
            ]
            if changed:
                raise ValueError(
                    f"--resume: {_shortened('; '.join(changed))}: undo that, or drop --resume "
                    "to start from scratch"
                )
            self.complete = "complete" in latest
            if self.complete and not _matches_streams(latest["complete"], self._prefixes):
                raise ValueError(
                    _corrupt_message(self._journal, "its descriptions do not match the streams")
                )
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
        """Raise ValueError if other data sets exist, unless they are to be overwritten."""
        existing = [f"{p}{s}" for p in self._prefixes for s in _SUFFIXES if Path(p + s).exists()]
        if resume and existing and self._finished() is not None:
            self.complete = True
        elif existing and not overwrite:
            reason = " and was made from other options or inputs" if resume else ""
            raise ValueError(
                f"{existing[-1]} exists{reason}: give another --output-prefix, or --overwrite to "
                "replace it"
            )

    def _finished(self) -> list[Mapping[str, Any] | None] | None:
        """Return the descriptions if a run with this header has finished; else None."""
        descriptions: list[Mapping[str, Any] | None] = []
        for prefix, stream in zip(self._prefixes, self._streams, strict=True):
            if not all(Path(f"{prefix}{ending}").exists() for ending in (".bin", ".idx")):
                return None
            if not stream.has_description:
                descriptions.append(None)
                continue
            try:
                description = read_json(f"{prefix}.json", follow_links=True)
            except (OSError, ValueError):
                return None
            if not isinstance(description, dict) or description.get("made_from") != self.made_from:
                return None
            descriptions.append(description)
        return descriptions

    def _open(self, streams: Sequence[Stream], latest: Mapping[str, Any] | None) -> None:
        written: list[Written | None] = [None] * len(streams)
        if latest is not None:
            try:
                self.position = Position(**_checked_counts(latest["position"]))
                self.tally = _tally(latest["tally"])
                written = [Written(**_checked_counts(counts)) for counts in latest["written"]]
                if len(written) != len(streams):
                    raise TypeError(f"{len(written)} data sets, not {len(streams)}")
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(_corrupt_message(self._journal, f"{error}")) from None
        for prefix, stream, counts in zip(self._prefixes, streams, written, strict=True):
            self._writers.append(
                IndexedDatasetWriter(prefix, stream.dtype, draft=_DRAFT, written=counts)
            )

    @property
    def written(self) -> list[Written]:
        """Return the committed and uncommitted size of each data set."""
        return [
            Written(tokens=w.num_tokens, sequences=w.num_sequences, documents=w.num_documents)
            for w in self._writers
        ]

    def add(self, encoded: Encoded) -> None:
        """Append the documents of a block; commit every `commit_bytes` of input."""
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
        """Flush everything to disk; `publish` then only renames files.

        Args:
            descriptions: contents of each stream's `<prefix>.json`; None for no such file.
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
        # From here on only file names change; a resumed run repeats the renames.
        self._journal.append({"complete": list(descriptions)})
        self.complete = True

    def publish(self) -> list[Mapping[str, Any] | None]:
        """Rename the drafts to their final names, write the descriptions and delete the journal.

        Returns:
            The descriptions.
        """
        if self._journal.latest is None:  # an earlier run has finished
            finished = self._finished()
            assert finished is not None
            self._journal.remove()
            return finished
        descriptions = self._journal.latest["complete"]
        self._remove_stale()
        # The first stream comes last: its index marks the output as complete.
        for prefix, description in reversed(list(zip(self._prefixes, descriptions, strict=True))):
            # Write the description before the index appears, so that an index always has one.
            if description is not None:
                target = Path(f"{prefix}.json")
                for stale_file in target.parent.glob(f"{glob.escape(target.name)}.*.tmp"):
                    stale_file.unlink()  # left by a killed run: this run has the journal's lock
                with atomic_write(target) as stream:
                    stream.write(json.dumps(description, indent=1).encode() + b"\n")
            publish_draft(prefix, _DRAFT if self._shuffle_seed is None else _SHUFFLED)
            drop_draft(prefix, _DRAFT)
        self._journal.remove()
        return descriptions

    def _remove_stale(self) -> None:
        """Delete files of replaced data sets that the new ones do not have, e.g. a mask."""
        written = {f"{prefix}{end}" for prefix in self._prefixes for end in (".bin", ".idx")}
        for prefix in self._prefixes:
            for path in (f"{prefix}{suffix}" for suffix in _SUFFIXES[:2]):
                if path not in written:
                    Path(path).unlink(missing_ok=True)

    def stop(self, *, keep: bool) -> bool:
        """Stop before the output is complete.

        Args:
            keep: whether to keep committed data for a resumed run.

        Returns:
            Whether a resumed run can continue.
        """
        resumable = self.complete or (keep and "position" in (self._journal.latest or {}))
        for writer in self._writers:
            writer.keep() if resumable else writer.abort()
        if not self.complete:
            for prefix in self._prefixes:
                drop_draft(prefix, _SHUFFLED)
        self._journal.close() if resumable else self._journal.remove()
        return resumable


def journal_path(prefix: str | Path) -> Path:
    """Return the path of the journal for an output prefix."""
    return Path(f"{prefix}.journal")


def _matches_streams(descriptions: Any, prefixes: Sequence[str]) -> bool:
    """Return whether the descriptions are a dict or None for each data set."""
    return (
        isinstance(descriptions, list)
        and len(descriptions) == len(prefixes)
        and all(
            description is None or isinstance(description, dict) for description in descriptions
        )
    )


def _checked_counts(fields: Mapping[str, Any]) -> Mapping[str, int]:
    """Check that the journal's fields are counts and return them. Raises TypeError."""
    for name, value in fields.items():
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise TypeError(f"{name} is {str(value)[:40]!r}")
    return fields


def _corrupt_message(journal: Journal, why: str) -> str:
    return f"--resume: {journal.path} is damaged ({why}): drop --resume to start from scratch"


def _tally(values: Mapping[str, Any]) -> Tally:
    return Tally(
        **_checked_counts({name: values[name] for name in ("documents", "read_bytes")}),
        rejected=Counter(_checked_counts(values["rejected"])),
        examples={str(reason): str(location) for reason, location in values["examples"].items()},
        strict=values["strict"] is True,
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
