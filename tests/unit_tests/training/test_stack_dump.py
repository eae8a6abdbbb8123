# SPDX-License-Identifier: Apache-2.0
"""A file of stacks: every thread, the error that caused it; failing to write is no error."""

from __future__ import annotations

import threading

from megatron.training.fault_tolerance.hang_files import stack_file, write_stacks


def _resting(ready: threading.Event, finished: threading.Event) -> None:
    ready.set()
    finished.wait()


def test_every_thread_and_the_error_are_in_the_file(tmp_path):
    ready, finished = threading.Event(), threading.Event()
    thread = threading.Thread(target=_resting, args=(ready, finished))
    thread.start()
    ready.wait()
    path = stack_file(str(tmp_path / "new"), attempt=2, rank=3)
    try:
        try:
            raise KeyError("what happened")
        except KeyError as error:
            write_stacks(path, "rank 1 is dead", root=tmp_path, error=error)
    finally:
        finished.set()
        thread.join()
    text = path.read_text()
    assert path.name == "attempt_2_rank_3.txt"
    assert text.splitlines()[0].endswith("rank 1 is dead")
    for fragment in ("KeyError: 'what happened'", "in _resting", "test_every_thread"):
        assert fragment in text


def test_unwritable_stack_file_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    write_stacks(tmp_path / "file" / "stacks.txt", "reason", root=tmp_path)
