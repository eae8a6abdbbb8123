# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints: commit protocol, lock, list, verification, retention.

The commit protocol: a checkpoint appears under its name complete and on disk, or not at all.

    iter_0000100.tmp-<random>/   shards written and synced by their ranks, then manifest.json
    rename to iter_0000100/      the one step that makes it a checkpoint; the parent is synced
    latest_checkpointed_iteration.txt   replaced by a synced temporary file

A process may be killed between any two of these. A name is never renamed over.

At start-up a run locks its save folder: one run at a time, checked to be writable, leftovers of
interrupted saves removed. Readers share a `flock` on a checkpoint's manifest, which retention needs
exclusively, so a checkpoint that any process has open is not removed. A lock ends with its process,
however that ends. Verification checks a whole checkpoint without a model: sizes always, every byte
on request. Retention chooses which checkpoints are removed once a newer one is complete.

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from megatron.core.boxes import tiles
from megatron.core.dist_checkpointing.errors import (
    CheckpointError,
    DamagedCheckpointError,
    RemovedCheckpointError,
    print_to_stderr,
)
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    Manifest,
    StoredChunk,
    encode_manifest,
    iteration_of,
    max_manifest_bytes,
    read_manifest,
)
from megatron.core.dist_checkpointing.shard_file import PIECE_BYTES, ShardFile, check_size
from megatron.core.untrusted_files import (
    UnsafeFileError,
    link_target,
    open_lock,
    open_to_write,
    read_regular,
    regular_fd,
)

TRACKER_NAME = "latest_checkpointed_iteration.txt"

_TEMPORARY = re.compile(r"iter_\d{7,}\.tmp-[0-9a-f]{16}")


def checkpoint_folder(root: Path | str, iteration: int) -> Path:
    """Return where the checkpoint of `iteration` lies, whether it exists or not."""
    if iteration < 0:
        raise ValueError(f"iteration must not be negative, got {iteration}")
    return Path(root, f"iter_{iteration:07d}")


def temporary_folder(folder: Path) -> Path:
    """Return a name next to `folder` that nobody else uses and that `is_temporary` recognises."""
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(8)}")


def is_temporary(folder: Path) -> bool:
    """Return whether a folder is what an interrupted save or removal left behind."""
    return _TEMPORARY.fullmatch(folder.name) is not None


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write a small new file and make its content durable."""
    with open_to_write(path, "x") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_temporary(root: Path, iteration: int, *, name: str | None = None) -> Path:
    """Create the folder that a save writes into.

    Args:
        name: of the folder, as `temporary_folder` makes them; None makes one.

    Raises:
        CheckpointError: the step has been saved, or nothing can be written.
    """
    folder = checkpoint_folder(root, iteration)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder):
            raise CheckpointError(
                f"{folder} exists already and is never overwritten: remove it, or save elsewhere"
            )
        temporary = temporary_folder(folder) if name is None else root / name
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"cannot save under {root}: {error.strerror}; name a folder that can be written"
        ) from error
    return temporary


def publish(temporary: Path, manifest: Manifest) -> Path:
    """Write the manifest into a folder of synced shards and give the folder its name.

    Raises:
        CheckpointError: a shard is not as its rank wrote it, the name is taken, or the file
            system refuses.
    """
    root = temporary.parent
    folder = checkpoint_folder(root, manifest.iteration)
    try:
        for name, file in manifest.files.items():
            size = (temporary / name).stat().st_size
            if size != file.bytes:
                raise CheckpointError(
                    f"{temporary / name} has {size} bytes here, its rank wrote {file.bytes}: all "
                    "ranks must see the same file system"
                )
        content = encode_manifest(manifest)
        limit = max_manifest_bytes(sum(file.bytes for file in manifest.files.values()))
        if len(content) > limit:
            raise CheckpointError(
                f"cannot complete {folder}: its manifest has {len(content)} bytes, more than the "
                f"{limit} that are read for such shards; shorten names or join small tensors"
            )
        write_synced(temporary / MANIFEST_NAME, content)
        sync_folder(temporary)
        # rename would silently replace an empty folder of that name
        if os.path.lexists(folder):
            raise CheckpointError(f"{folder} has appeared during the save and is left as it is")
        os.rename(temporary, folder)
        sync_folder(root)
    except OSError as error:
        raise CheckpointError(
            f"cannot complete {folder}: {error.strerror}: {error.filename}; nothing was saved, "
            "earlier checkpoints are intact"
        ) from error
    return folder


def write_tracker(root: Path, iteration: int) -> None:
    """Make the tracker name `iteration`, in one step. Raises CheckpointError."""
    temporary = root / f"{TRACKER_NAME}.tmp-{secrets.token_hex(8)}"
    try:
        write_synced(temporary, f"{iteration}\n".encode())
        os.replace(temporary, root / TRACKER_NAME)
        sync_folder(root)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{checkpoint_folder(root, iteration)} is complete, but {root / TRACKER_NAME} could "
            f"not be written: {error.strerror}"
        ) from error


@contextlib.contextmanager
def reading(folder: Path | str) -> Iterator[None]:
    """Keep a checkpoint from being removed until the block ends. It may be entered several times.

    Raises:
        RemovedCheckpointError: it is gone, or is being removed at this moment.
        DamagedCheckpointError: it is incomplete.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    try:
        fd = regular_fd(path)
    except OSError as error:
        _check_not_removed(folder)
        raise DamagedCheckpointError(
            f"cannot read {path}: {error.strerror}: {folder} is not a complete checkpoint"
        ) from error
    try:
        # Without locks in the file system nothing is removed either: that needs one.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RemovedCheckpointError(f"{folder} is being removed by retention") from None
        if not _is_at(fd, path):  # it went between the two calls
            raise RemovedCheckpointError(f"{folder} was removed by retention at this moment")
        yield
    finally:
        os.close(fd)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint that nobody reads. It loses its name first, so that a half-removed one is
    never taken for a checkpoint.

    Raises:
        CheckpointError: it is being read, or cannot be removed.
    """
    path = folder / MANIFEST_NAME
    doomed = temporary_folder(folder)
    try:
        fd = open_lock(path, make=False)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{folder} is being read and stays for now") from None
            os.rename(folder, doomed)
            sync_folder(folder.parent)
            _discard(doomed)
        finally:
            os.close(fd)
    except OSError as error:
        left = f"; {doomed.name} is what is left of it" if doomed.is_dir() else ""
        raise CheckpointError(f"cannot remove {folder}: {error.strerror}{left}") from error


def _discard(path: Path) -> None:
    """Remove a folder, or a link or a file in its place: what a link leads to is not removed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _check_not_removed(folder: Path) -> None:
    """Raise RemovedCheckpointError if there is nothing under the name of a checkpoint any more."""
    if not os.path.lexists(folder):
        raise RemovedCheckpointError(f"{folder} is not there any more: it was removed or renamed")


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was verified, and files that are in the folder without belonging to the checkpoint."""

    bytes_verified: int
    unexpected_files: tuple[str, ...]


def verify_checkpoint(
    folder: Path | str, *, digests: bool = True, follow_links: bool = True
) -> VerifyReport:
    """Check that a checkpoint is complete and undamaged.

    Args:
        folder: an `iter_...` folder.
        digests: whether to read everything and compare digests; else the manifest, its coverage
            of every tensor and the size of every file are checked.
        follow_links: whether the folder may be a link to anywhere: only one that the user names.
            One that was found in a run's folder may be a link inside that.

    Raises:
        RemovedCheckpointError: it was removed meanwhile.
        CheckpointError: naming the first thing that is wrong.
    """
    folder = Path(folder)
    if not follow_links:
        check_link(folder)
    with contextlib.ExitStack() as stack:
        if digests:
            stack.enter_context(reading(folder))  # it takes a while
        return verify_contents(folder, read_manifest(folder), digests=digests)


def verify_contents(folder: Path, manifest: Manifest, *, digests: bool) -> VerifyReport:
    """Check that a folder is complete and undamaged by its manifest; see `verify_checkpoint`."""
    if digests and not manifest.digests:
        raise CheckpointError(f"{folder} was saved without digests: only sizes can be checked")
    try:
        for name, file in manifest.files.items():
            check_size(folder / name, file)
        _check_whole(folder, manifest)
        return VerifyReport(
            bytes_verified=_verify_bytes(folder, manifest) if digests else 0,
            unexpected_files=unexpected_files(folder, manifest),
        )
    except OSError as error:
        _check_not_removed(folder)
        raise DamagedCheckpointError(f"cannot read {folder}: {error.strerror}") from error
    except DamagedCheckpointError:
        _check_not_removed(folder)
        raise


def check_link(folder: Path) -> None:
    """Check that a folder found in a run's folder is no link that leads out of that.

    Raises:
        DamagedCheckpointError: it is.
    """
    if not folder.is_symlink():
        return
    try:
        target, is_inside = link_target(folder)
    except UnsafeFileError as error:
        raise DamagedCheckpointError(f"cannot use {folder}: {error.strerror}") from error
    if not is_inside:
        raise DamagedCheckpointError(
            f"{folder} is a link to {target}, outside {folder.parent}: name it itself, or put the "
            "folder there"
        )


def unexpected_files(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """List what is in a checkpoint's folder without belonging to it."""
    known = {MANIFEST_NAME, *manifest.files}
    return tuple(sorted(path.name for path in folder.iterdir() if path.name not in known))


def _check_whole(folder: Path, manifest: Manifest) -> None:
    """Check that the chunks of every tensor cover it, and those of every file that, exactly once:
    a tensor that the manifest no longer names leaves a gap in a file."""
    ends: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        if not tiles([chunk.box for chunk in tensor.chunks], tensor.shape):
            raise DamagedCheckpointError(
                f"{folder} does not hold every element of {name} exactly once"
            )
        for chunk in tensor.chunks:
            ends[chunk.file].append((chunk.begin, chunk.end))
    for file, spans in ends.items():
        position = manifest.files[file].header_bytes
        for begin, end in sorted(spans):
            if begin != position:
                break
            position = end
        if position != manifest.files[file].bytes:
            raise DamagedCheckpointError(
                f"{folder / file} holds bytes from {position} on that are of no tensor in "
                f"{MANIFEST_NAME}, or of two"
            )


def _verify_bytes(folder: Path, manifest: Manifest) -> int:
    """Read every file and return how many bytes matched their digests."""
    by_file: dict[str, list[tuple[str, StoredChunk]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            by_file[chunk.file].append((name, chunk))
    scratch = memoryview(bytearray(PIECE_BYTES))
    verified = 0
    for file, chunks in sorted(by_file.items()):
        path, block_bytes = folder / file, manifest.block_bytes
        with ShardFile(path, manifest.files[file], block_bytes=block_bytes, verify=True) as reader:
            for name, chunk in sorted(chunks, key=lambda pair: pair[1].begin):
                reader.verify(name, chunk, scratch)
        verified += reader.bytes_verified
    return verified


def damage_of(folder: Path) -> str:
    """Return what to add about a folder that is kept: nothing if it is whole."""
    try:
        verify_checkpoint(folder, digests=False)
    except CheckpointError as error:
        return f" but is damaged ({error}): remove it"
    return " and is kept"


#: How often a folder is listed again whose checkpoints are removed while they are looked at.
ATTEMPTS = 5

#: Foreign files named in one line; the rest is counted.
MAX_FILES = 8

#: An iteration, and what an editor or another program may add.
MAX_TRACKER_BYTES = 1 << 16


def list_checkpoints(root: Path | str) -> list[Path]:
    """Return the checkpoint folders in `root`, newest first, undamaged or not."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = [(iteration_of(path), path) for path in root.iterdir() if path.is_dir()]
    return [path for _, path in sorted((i, path) for i, path in found if i is not None)][::-1]


def latest_checkpoint(
    root: Path | str,
    *,
    digests: bool = False,
    passed_over: Collection[Path] = (),
    fall_back: bool = True,
    say: Callable[[str], None] = print_to_stderr,
    verify: Callable[[Path], VerifyReport] | None = None,
) -> Path | None:
    """Return the checkpoint to resume from, or None if there is no trace of one.

    That is the newest undamaged one, whatever the tracker contains: it is a hint for people and
    other programs. One line reports when it names another one or none, when newer ones are
    damaged, and when there are files in the folder that do not belong to it.

    Args:
        root: folder of all checkpoints of a run.
        digests: whether "undamaged" means every byte, or manifest and file sizes.
        passed_over: checkpoints in `root` that are known to be corrupt and have been reported.
        fall_back: whether an older one may be returned if the newest one is damaged.
        say: receives the lines.
        verify: checks one, as `verify_checkpoint` does; None: that, by `digests`.

    Raises:
        CheckpointError: there were checkpoints, and all are damaged; or the newest one is and
            `fall_back` is off; or one was written by another version of this library.
    """
    verify = verify or partial(verify_checkpoint, digests=digests, follow_links=False)
    for _ in range(ATTEMPTS - 1):
        # What retention removes meanwhile is not damaged, and there are newer ones then.
        with contextlib.suppress(RemovedCheckpointError):
            return _latest(Path(root), passed_over, fall_back=fall_back, say=say, verify=verify)
    return _latest(Path(root), passed_over, fall_back=fall_back, say=say, verify=verify)


def _latest(
    root: Path,
    passed_over: Collection[Path],
    *,
    fall_back: bool,
    say: Callable[[str], None],
    verify: Callable[[Path], VerifyReport],
) -> Path | None:
    """Do what `latest_checkpoint` says, or raise RemovedCheckpointError."""
    folders = [folder for folder in list_checkpoints(root) if folder not in passed_over]
    tracked, tracker = _read_tracker(root)
    if not folders and not passed_over and tracked is None and not tracker:
        return None
    damages = []
    for folder in folders:
        try:
            report = verify(folder)
        except RemovedCheckpointError:
            raise
        except DamagedCheckpointError as error:
            damages.append(str(error))
            if not fall_back:
                break
            continue
        if damages:
            say(f"WARNING: falling back to {folder}: {'; '.join(damages)}")
        elif folder != tracked and not passed_over:
            tracker = tracker or f"{root / TRACKER_NAME} names {_what_is(tracked)}"
            say(f"{tracker}; using {folder.name}, the newest undamaged checkpoint")
        if report.unexpected_files:
            say(unexpected_line(folder, report.unexpected_files))
        return folder
    if not folders and not passed_over:
        damages.append(tracker or f"{root / TRACKER_NAME} names {_what_is(tracked)}")
    if damages and not fall_back:
        raise DamagedCheckpointError(f"the newest checkpoint in {root} is damaged: {damages[0]}")
    reasons = f": {'; '.join(damages)}" if damages else ""
    raise DamagedCheckpointError(f"no undamaged checkpoint in {root}{reasons}")


def unexpected_line(folder: Path, files: Sequence[str]) -> str:
    """Return a line about files that are in a checkpoint's folder and are no part of it."""
    listed = ", ".join(files[:MAX_FILES])
    more = f" and {len(files) - MAX_FILES} more" if len(files) > MAX_FILES else ""
    return f"WARNING: {folder} holds files that do not belong to it and are ignored: {listed}{more}"


def tracked_checkpoint(root: Path | str) -> Path | None:
    """Return the folder that the tracker names, whether it exists or not; None if it names none."""
    return _read_tracker(Path(root))[0]


def sweep_temporary(root: Path | str) -> list[Path]:
    """Remove what interrupted saves and removals left in `root`, and return what was removed.

    Only for the start of a run that has claimed `root`: it would remove a save in progress. What a
    writer process of an ended run still writes to cannot become a checkpoint afterwards.
    """
    root = Path(root)
    removed = []
    for path in sorted(root.iterdir()):
        if is_temporary(path):
            # Under its old name a surviving writer would go on to add files and commit.
            doomed = temporary_folder(path.with_name(path.name.split(".")[0]))
            os.rename(path, doomed)
            _discard(doomed)
        elif path.name.startswith(f"{TRACKER_NAME}.tmp-"):
            path.unlink()
        else:
            continue
        removed.append(path)
    return removed


def _read_tracker(root: Path) -> tuple[Path | None, str]:
    """Return the folder that the tracker names, or why it names none ("" without a tracker and any
    checkpoint)."""
    path = root / TRACKER_NAME
    try:
        text = read_regular(path, MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None, f"{path} does not exist" if list_checkpoints(root) else ""
    except OSError as error:
        return None, f"cannot read {path}: {error.strerror}"
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        return None, f"{path} holds {text[:40]!r}, not an iteration"
    return checkpoint_folder(root, int(text)), ""


def _what_is(folder: Path | None) -> str:
    """Return the name of what a tracker names, and whether it is there."""
    if folder is None:
        return "none"
    return folder.name + ("" if folder.is_dir() else ", which is not there")


LOCK_NAME = ".writer.lock"


class SaveFolderClaim:
    """The right to save into a folder, held by one process until `close` or its end.

    Rank 0 of a run makes one before the first step. It creates the folder, refuses a folder that
    another live run has claimed, finds out now rather than at the first save whether it can be
    written, and removes what interrupted saves left.

    The lock is a POSIX record lock: it ends with the process, however that ends, is not inherited
    by forked workers, and works between hosts on NFS.

    Args:
        root: folder of all checkpoints of a run.

    Raises:
        CheckpointError: the folder cannot be written or is claimed.
    """

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root)
        path = self._root / LOCK_NAME
        try:
            self._made_root = not self._root.exists()
            self._root.mkdir(parents=True, exist_ok=True)
            self._fd = open_lock(path)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            self._lock(path)
            self._test_write()
            self.swept = tuple(sweep_temporary(self._root))
        except OSError as error:
            self.close()
            raise self._refusal(error) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SaveFolderClaim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder free; calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Give the folder free and, if there is nothing in it, leave no trace of the claim."""
        if self._fd >= 0 and os.listdir(self._root) == [LOCK_NAME]:
            with contextlib.suppress(OSError):
                (self._root / LOCK_NAME).unlink()
                if self._made_root:
                    self._root.rmdir()
        self.close()

    def _lock(self, path: Path) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.pread(self._fd, 200, 0).decode(errors="replace").strip()
            raise CheckpointError(
                f"{self._root} is in use by another run ({owner or 'unknown'}): stop it, or save "
                "elsewhere"
            ) from error
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._fd)):
            raise CheckpointError(
                f"{self._root} was abandoned by another run at this moment: start again"
            )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _test_write(self) -> None:
        test = self._root / f".write-test-{os.getpid()}"
        test.unlink(missing_ok=True)
        try:
            write_synced(test, b"x" * 4096)
            sync_folder(self._root)
        finally:
            test.unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> CheckpointError:
        if isinstance(error, UnsafeFileError):
            return CheckpointError(f"cannot save under {self._root}: {error.strerror}")
        return CheckpointError(
            f"cannot save under {self._root}: {error.strerror}; name a folder that can be written"
        )


def see_claim(root: Path | str) -> None:
    """See that a folder which this run has claimed is still there: a file system may have gone, or
    somebody may have moved the folder, and a save would quietly begin another one in its place.

    Raises:
        CheckpointError: it is not.
    """
    if not Path(root, LOCK_NAME).exists():
        raise CheckpointError(
            f"{root} is no longer the folder that this run claimed, as {LOCK_NAME} is not in it: "
            "bring it back, what was saved is where it went"
        )


def prune_checkpoints(
    root: Path | str,
    *,
    keep_last: int,
    retain_interval: int | None = None,
    say: Callable[[str], None] = print_to_stderr,
) -> list[Path]:
    """Remove checkpoints that are no longer wanted, and return those that are gone.

    Kept are the newest `keep_last` undamaged ones, so the newest one always, those at multiples of
    `retain_interval`, the one that the tracker names, damaged ones, for someone to look at, and
    what any process is reading (`reading`). Nothing is waited for: what cannot be removed now is
    reported to `say` and tried again the next time.

    Args:
        root: folder of all checkpoints of a run, which the caller alone saves in.
        keep_last: how many of the newest ones stay.
        retain_interval: iterations between checkpoints that stay for good; None = there are none.
        say: receives a line for each that should have gone and could not.

    Raises:
        ValueError: `keep_last` or `retain_interval` is below 1.
    """
    for name, value in (("keep_last", keep_last), ("retain_interval", retain_interval)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    root = Path(root)
    kept = {tracked_checkpoint(root)}
    undamaged = 0
    removed = []
    for folder in list_checkpoints(root):
        iteration = iteration_of(folder)
        assert iteration is not None
        for_good = retain_interval is not None and iteration % retain_interval == 0
        if undamaged >= keep_last and (for_good or folder in kept):
            continue  # whether it is whole would change nothing
        try:
            verify_checkpoint(folder, digests=False, follow_links=False)
        except CheckpointError:
            continue
        undamaged += 1
        if undamaged <= keep_last or for_good or folder in kept:
            continue
        try:
            remove_checkpoint(folder)
        except CheckpointError as error:
            say(f"retention: {error}")
            continue
        removed.append(folder)
    return removed
