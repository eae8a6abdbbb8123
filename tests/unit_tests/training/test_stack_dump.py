# SPDX-License-Identifier: Apache-2.0
"""A file of stacks: every thread, the error that led to it, and no error of its own."""

from __future__ import annotations

import threading

from megatron.training.failures.hang_files import stack_file, write_stacks


def _resting(ready: threading.Event, over: threading.Event) -> None:
    ready.set()
    over.wait()


def test_every_thread_and_the_error_are_in_the_file(tmp_path):
    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=_resting, args=(ready, over))
    thread.start()
    ready.wait()
    path = stack_file(str(tmp_path / "new"), attempt=2, rank=3)
    try:
        try:
            raise KeyError("what happened")
        except KeyError as error:
            write_stacks(path, "rank 1 is dead", root=tmp_path, error=error)
    finally:
        over.set()
        thread.join()
    text = path.read_text()
    assert path.name == "attempt_2_rank_3.txt"
    assert text.splitlines()[0].endswith("rank 1 is dead")
    for part in ("KeyError: 'what happened'", "in _resting", "test_every_thread"):
        assert part in text


def test_a_file_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    write_stacks(tmp_path / "file" / "stacks.txt", "reason", root=tmp_path)
