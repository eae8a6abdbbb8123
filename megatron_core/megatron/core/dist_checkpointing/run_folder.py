# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints: commit protocol, lock, list, verification, retention.

The commit protocol: a checkpoint appears under its name complete and on disk, or not at all.

    iter_0000100.tmp-<random>/   shards written and synced by their ranks, then manifest.json
    rename to iter_0000100/      the one step that makes it a checkpoint; the parent is synced
    latest_checkpointed_iteration.txt   replaced by a synced temporary file

A process may be killed between any two steps. A rename never replaces an existing folder.

At start-up a run locks its save folder, so that one run at a time saves there, checks that it is
writable, and removes the temporary folders of interrupted saves. Readers share a `flock` on a
checkpoint's manifest; retention takes the lock exclusively, so it never removes a checkpoint that
any process has open. The kernel releases a lock when its process ends. Verification checks a whole
checkpoint without a model: sizes always, every byte on request. Retention removes old checkpoints
once a newer one is complete.

Nothing here imports torch.
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
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    Manifest,
    StoredChunk,
    encode_manifest,
    iteration_of,
    max_manifest_bytes,
    read_manifest,
)
from megatron.core.dist_checkpointing.shard_file import READ_BUFFER_BYTES, ShardFile, check_size
from megatron.core.dist_checkpointing.shard_format import (
    CheckpointError,
    DamagedCheckpointError,
    RemovedCheckpointError,
    print_to_stderr,
)
from megatron.core.untrusted_files import (
    UnsafeFileError,
    link_target,
    open_lock,
    open_to_write,
    read_regular,
    regular_fd,
    sync_folder,
)

TRACKER_NAME = "latest_checkpointed_iteration.txt"

_TEMPORARY = re.compile(r"iter_\d{7,}\.tmp-[0-9a-f]{16}")


def checkpoint_folder(root: Path | str, iteration: int) -> Path:
    """Return the folder of the checkpoint of `iteration`, which may not exist."""
    if iteration < 0:
        raise ValueError(f"iteration must not be negative, got {iteration}")
    return Path(root, f"iter_{iteration:07d}")


def temporary_folder(folder: Path) -> Path:
    """Return a unique name next to `folder` that `is_temporary` recognises."""
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(8)}")


def is_temporary(folder: Path) -> bool:
    """Return whether a folder is the temporary folder of a save or a removal."""
    return _TEMPORARY.fullmatch(folder.name) is not None


def write_synced(path: Path, content: bytes) -> None:
    """Write and sync a small new file."""
    with open_to_write(path, "x") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def open_temporary(root: Path, iteration: int, *, name: str) -> None:
    """Create the temporary folder of a save.

    Args:
        name: the folder's name, as returned by `temporary_folder`.

    Raises:
        CheckpointError: the step has already been saved, or `root` is not writable.
    """
    folder = checkpoint_folder(root, iteration)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder):
            raise CheckpointError(
                f"{folder} exists already and is never overwritten: remove it, or save elsewhere"
            )
        (root / name).mkdir()
    except OSError as error:
        raise CheckpointError(
            f"cannot save under {root}: {error.strerror}; name a folder that can be written"
        ) from error


def publish(temporary: Path, manifest: Manifest) -> Path:
    """Write the manifest into a folder of synced shards and rename the folder to its final name.

    Raises:
        CheckpointError: a shard's size is not the size its rank wrote, the name is taken, or the
            file system fails.
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
                f"cannot complete {folder}: its manifest has {len(content)} bytes, more than "
                f"the limit of {limit} for such shards; shorten names or join small tensors"
            )
        write_synced(temporary / MANIFEST_NAME, content)
        sync_folder(temporary)
        # rename would silently replace an empty folder of that name
        if os.path.lexists(folder):
            raise CheckpointError(f"{folder} has appeared during the save and was not changed")
        os.rename(temporary, folder)
        sync_folder(root)
    except OSError as error:
        raise CheckpointError(
            f"cannot complete {folder}: {error.strerror}: {error.filename}; nothing was saved, "
            "earlier checkpoints are intact"
        ) from error
    return folder


def write_tracker(root: Path, iteration: int) -> None:
    """Atomically write `iteration` to the tracker. Raises CheckpointError."""
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
    """Prevent retention from removing a checkpoint until the block ends; any number of readers.

    Raises:
        RemovedCheckpointError: the checkpoint does not exist, or is being removed now.
        DamagedCheckpointError: the checkpoint is incomplete.
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
        # On a file system without locks, reading is safe: removal fails without its lock.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RemovedCheckpointError(f"{folder} is being removed by retention") from None
        if not _is_at(fd, path):  # removed between open and flock
            raise RemovedCheckpointError(f"{folder} was just removed by retention")
        yield
    finally:
        os.close(fd)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint that no process reads.

    The folder is renamed first, so that a partly removed folder never has a checkpoint's name.

    Raises:
        CheckpointError: the checkpoint is being read, or cannot be removed.
    """
    path = folder / MANIFEST_NAME
    renamed = temporary_folder(folder)
    try:
        fd = open_lock(path, make=False)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{folder} is being read and is kept for now") from None
            os.rename(folder, renamed)
            sync_folder(folder.parent)
            _discard(renamed)
        finally:
            os.close(fd)
    except OSError as error:
        leftover = f"; {renamed.name} remains of it" if renamed.is_dir() else ""
        raise CheckpointError(f"cannot remove {folder}: {error.strerror}{leftover}") from error


def _discard(path: Path) -> None:
    """Remove a folder, a link or a file; a link's target is not removed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _check_not_removed(folder: Path) -> None:
    """Raise RemovedCheckpointError if a checkpoint's folder no longer exists."""
    if not os.path.lexists(folder):
        raise RemovedCheckpointError(f"{folder} no longer exists: it was removed or renamed")


def _is_at(fd: int, path: Path) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Number of verified bytes, and files in the folder that do not belong to the checkpoint."""

    bytes_verified: int
    unexpected_files: tuple[str, ...]


def verify_checkpoint(
    folder: Path | str, *, digests: bool = True, follow_links: bool = True
) -> VerifyReport:
    """Check that a checkpoint is complete and undamaged.

    Args:
        folder: an `iter_...` folder.
        digests: whether to read all bytes and compare digests. Otherwise only the manifest, its
            coverage of every tensor and the size of every file are checked.
        follow_links: whether the folder may be a link to any folder. True only for a path that the
            user names. False accepts only a link that stays inside the parent folder.

    Raises:
        RemovedCheckpointError: the checkpoint was removed meanwhile.
        CheckpointError: the first problem.
    """
    folder = Path(folder)
    if not follow_links:
        check_link(folder)
    with contextlib.ExitStack() as stack:
        if digests:
            stack.enter_context(reading(folder))  # retention may run during this long read
        return verify_contents(folder, read_manifest(folder), digests=digests)


def verify_contents(folder: Path, manifest: Manifest, *, digests: bool) -> VerifyReport:
    """Check a folder against its manifest; see `verify_checkpoint`."""
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
    """Check that a checkpoint's folder is not a link to a target outside its parent folder.

    Raises:
        DamagedCheckpointError: the folder is such a link.
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
    """List the files in a checkpoint's folder that its manifest does not name."""
    expected_names = {MANIFEST_NAME, *manifest.files}
    return tuple(sorted(path.name for path in folder.iterdir() if path.name not in expected_names))


def _check_whole(folder: Path, manifest: Manifest) -> None:
    """Check that the chunks cover every tensor and every file exactly once.

    A tensor that was removed from the manifest leaves a gap in a file.
    """
    spans_by_file: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        if not tiles([chunk.box for chunk in tensor.chunks], tensor.shape):
            raise DamagedCheckpointError(
                f"{folder} does not hold every element of {name} exactly once"
            )
        for chunk in tensor.chunks:
            spans_by_file[chunk.file].append((chunk.begin, chunk.end))
    for file, spans in spans_by_file.items():
        position = manifest.files[file].header_bytes
        for begin, end in sorted(spans):
            if begin != position:
                break
            position = end
        if position != manifest.files[file].bytes:
            raise DamagedCheckpointError(
                f"{folder / file} has bytes from {position} on that belong to no tensor in "
                f"{MANIFEST_NAME}, or to two"
            )


def _verify_bytes(folder: Path, manifest: Manifest) -> int:
    """Read every file and return how many bytes matched their digests."""
    by_file: dict[str, list[tuple[str, StoredChunk]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            by_file[chunk.file].append((name, chunk))
    scratch = memoryview(bytearray(READ_BUFFER_BYTES))
    bytes_verified = 0
    for file, chunks in sorted(by_file.items()):
        path, block_bytes = folder / file, manifest.block_bytes
        with ShardFile(path, manifest.files[file], block_bytes=block_bytes, verify=True) as reader:
            for name, chunk in sorted(chunks, key=lambda pair: pair[1].begin):
                reader.verify(name, chunk, scratch)
        bytes_verified += reader.bytes_verified
    return bytes_verified


def existing_note(folder: Path) -> str:
    """Return the end of a message about an existing checkpoint: whether it is damaged."""
    try:
        verify_checkpoint(folder, digests=False)
    except CheckpointError as error:
        return f" but is damaged ({error}): remove it"
    return " and is kept"


#: Attempts to list a folder whose checkpoints are removed while they are verified.
ATTEMPTS = 5

#: Unexpected files named in one line; further files are only counted.
MAX_FILES = 8

#: Maximum size of a tracker: an iteration, and white space that an editor may add.
MAX_TRACKER_BYTES = 1 << 16


def list_checkpoints(root: Path | str) -> list[Path]:
    """Return the checkpoint folders in `root`, newest first, undamaged or not."""
    root = Path(root)
    if not root.is_dir():
        return []
    candidates = [(iteration_of(path), path) for path in root.iterdir() if path.is_dir()]
    return [path for _, path in sorted((i, path) for i, path in candidates if i is not None)][::-1]


def latest_checkpoint(
    root: Path | str,
    *,
    digests: bool = False,
    excluded: Collection[Path] = (),
    fall_back: bool = True,
    say: Callable[[str], None] = print_to_stderr,
    verify: Callable[[Path], VerifyReport] | None = None,
) -> Path | None:
    """Return the checkpoint to resume from: the newest undamaged one. Return None if `root`
    has neither checkpoints nor a tracker.

    The tracker is only a hint for people and other programs. One line reports a tracker that names
    another checkpoint or none, newer checkpoints that are damaged, and unexpected files.

    Args:
        root: folder of all checkpoints of a run.
        digests: whether "undamaged" means every byte, or manifest and file sizes.
        excluded: checkpoints in `root` that are known to be corrupt and have been reported.
        fall_back: whether an older checkpoint may be returned if the newest one is damaged.
        say: receives the lines.
        verify: verifies a checkpoint; None: `verify_checkpoint` with `digests`.

    Raises:
        CheckpointError: all checkpoints are damaged; or the newest is damaged and `fall_back` is
            off; or another version of this library wrote a checkpoint.
    """
    verify = verify or partial(verify_checkpoint, digests=digests, follow_links=False)
    for _ in range(ATTEMPTS - 1):
        # A checkpoint that retention removes meanwhile is not damaged, and newer ones exist.
        with contextlib.suppress(RemovedCheckpointError):
            return _latest(Path(root), excluded, fall_back=fall_back, say=say, verify=verify)
    return _latest(Path(root), excluded, fall_back=fall_back, say=say, verify=verify)


def _latest(
    root: Path,
    excluded: Collection[Path],
    *,
    fall_back: bool,
    say: Callable[[str], None],
    verify: Callable[[Path], VerifyReport],
) -> Path | None:
    """One attempt of `latest_checkpoint`; may raise RemovedCheckpointError."""
    folders = [folder for folder in list_checkpoints(root) if folder not in excluded]
    tracked, tracker_problem = _read_tracker(root)
    if not folders and not excluded and tracked is None and not tracker_problem:
        return None
    damage = []
    for folder in folders:
        try:
            report = verify(folder)
        except RemovedCheckpointError:
            raise
        except DamagedCheckpointError as error:
            damage.append(str(error))
            if not fall_back:
                break
            continue
        if damage:
            say(f"WARNING: falling back to {folder}: {'; '.join(damage)}")
        elif folder != tracked and not excluded:
            tracker_problem = (
                tracker_problem or f"{root / TRACKER_NAME} names {_tracker_target(tracked)}"
            )
            say(f"{tracker_problem}; using {folder.name}, the newest undamaged checkpoint")
        if report.unexpected_files:
            say(unexpected_files_warning(folder, report.unexpected_files))
        return folder
    if not folders and not excluded:
        damage.append(tracker_problem or f"{root / TRACKER_NAME} names {_tracker_target(tracked)}")
    if damage and not fall_back:
        raise DamagedCheckpointError(f"the newest checkpoint in {root} is damaged: {damage[0]}")
    reasons = f": {'; '.join(damage)}" if damage else ""
    raise DamagedCheckpointError(f"no undamaged checkpoint in {root}{reasons}")


def unexpected_files_warning(folder: Path, files: Sequence[str]) -> str:
    """Return a warning about files in a checkpoint's folder that do not belong to it."""
    listed = ", ".join(files[:MAX_FILES])
    suffix = f" and {len(files) - MAX_FILES} more" if len(files) > MAX_FILES else ""
    return (
        f"WARNING: {folder} contains files that do not belong to it and are ignored: "
        f"{listed}{suffix}"
    )


def tracked_checkpoint(root: Path | str) -> Path | None:
    """Return the folder that the tracker names, which may not exist; None if it names none."""
    return _read_tracker(Path(root))[0]


def remove_temporary(root: Path | str) -> list[Path]:
    """Remove what interrupted saves and removals left; return the removed paths.

    These are temporary folders and temporary tracker files. Call this only in a run that has locked
    `root`, while no save is in progress, because it would remove that save. A folder is renamed
    before its removal, so that a surviving writer process of an ended run cannot publish it.
    """
    root = Path(root)
    removed = []
    for path in sorted(root.iterdir()):
        if is_temporary(path):
            # Under its old name a surviving writer process could add files and commit.
            renamed = temporary_folder(path.with_name(path.name.split(".")[0]))
            os.rename(path, renamed)
            _discard(renamed)
        elif path.name.startswith(f"{TRACKER_NAME}.tmp-"):
            path.unlink()
        else:
            continue
        removed.append(path)
    return removed


def _read_tracker(root: Path) -> tuple[Path | None, str]:
    """Return (folder that the tracker names, reason if it names none).

    The reason is "" without a tracker if there are no checkpoints either.
    """
    path = root / TRACKER_NAME
    try:
        text = read_regular(path, MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None, f"{path} does not exist" if list_checkpoints(root) else ""
    except OSError as error:
        return None, f"cannot read {path}: {error.strerror}"
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        return None, f"{path} contains {text[:40]!r}, not an iteration"
    return checkpoint_folder(root, int(text)), ""


def _tracker_target(folder: Path | None) -> str:
    """Describe the folder that a tracker names."""
    if folder is None:
        return "none"
    return folder.name + ("" if folder.is_dir() else ", which does not exist")


LOCK_NAME = ".writer.lock"


class SaveFolderLock:
    """An exclusive lock on a save folder, until `close` or the end of the process.

    Rank 0 of a run takes the lock before the first step. This creates the folder, raises if another
    live run has the lock, checks that the folder is writable before the first save, and removes the
    temporary folders of interrupted saves.

    The lock is a POSIX record lock: the kernel releases it when the process ends, forked workers do
    not inherit it, and it works between hosts on NFS.

    Args:
        root: folder of all checkpoints of a run.

    Raises:
        CheckpointError: the folder is not writable, or another run has the lock.
    """

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root)
        path = self._root / LOCK_NAME
        try:
            self._created_root = not self._root.exists()
            self._root.mkdir(parents=True, exist_ok=True)
            self._fd = open_lock(path)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            self._lock(path)
            self._test_write()
            self.removed_paths = tuple(remove_temporary(self._root))
        except OSError as error:
            self.close()
            raise self._refusal(error) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SaveFolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; further calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Release the lock; if the folder is empty, also remove the lock file and a folder that
        this lock created."""
        if self._fd >= 0 and os.listdir(self._root) == [LOCK_NAME]:
            with contextlib.suppress(OSError):
                (self._root / LOCK_NAME).unlink()
                if self._created_root:
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
            raise CheckpointError(f"{self._root} was just released by another run: start again")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _test_write(self) -> None:
        test_file = self._root / f".write-test-{os.getpid()}"
        test_file.unlink(missing_ok=True)
        try:
            write_synced(test_file, b"x" * 4096)
            sync_folder(self._root)
        finally:
            test_file.unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> CheckpointError:
        if isinstance(error, UnsafeFileError):
            return CheckpointError(f"cannot save under {self._root}: {error.strerror}")
        return CheckpointError(
            f"cannot save under {self._root}: {error.strerror}; name a folder that can be written"
        )


def check_save_folder_lock(root: Path | str) -> None:
    """Check that the folder that this run has locked still exists.

    If the folder was moved or its file system unmounted, a save would silently create a new folder.

    Raises:
        CheckpointError: the lock file is not in the folder.
    """
    if not Path(root, LOCK_NAME).exists():
        raise CheckpointError(
            f"{root} is no longer the folder that this run locked, because {LOCK_NAME} is "
            "missing: restore the folder; what was saved is where it was moved"
        )


def prune_checkpoints(
    root: Path | str,
    *,
    keep_last: int,
    retain_interval: int | None = None,
    say: Callable[[str], None] = print_to_stderr,
) -> list[Path]:
    """Apply retention: remove old checkpoints and return their folders.

    Retention keeps the newest `keep_last` undamaged checkpoints, checkpoints at multiples of
    `retain_interval`, the checkpoint that the tracker names, damaged checkpoints for inspection,
    and checkpoints that any process is reading (`reading`). It does not wait: if a checkpoint
    cannot be removed now, `say` receives a line, and the next call tries again.

    Args:
        root: folder of all checkpoints of a run; only the caller saves in it.
        keep_last: number of newest undamaged checkpoints to keep.
        retain_interval: iterations between checkpoints that are kept permanently; None: none.
        say: receives a line for each checkpoint that could not be removed.

    Raises:
        ValueError: `keep_last` or `retain_interval` is below 1.
    """
    for name, value in (("keep_last", keep_last), ("retain_interval", retain_interval)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    root = Path(root)
    tracked = {tracked_checkpoint(root)}
    undamaged = 0
    removed = []
    for folder in list_checkpoints(root):
        iteration = iteration_of(folder)
        assert iteration is not None
        is_permanent = retain_interval is not None and iteration % retain_interval == 0
        if undamaged >= keep_last and (is_permanent or folder in tracked):
            continue  # kept in any case, so skip the verification
        try:
            verify_checkpoint(folder, digests=False, follow_links=False)
        except CheckpointError:
            continue
        undamaged += 1
        if undamaged <= keep_last or is_permanent or folder in tracked:
            continue
        try:
            remove_checkpoint(folder)
        except CheckpointError as error:
            say(f"retention: {error}")
            continue
        removed.append(folder)
    return removed
