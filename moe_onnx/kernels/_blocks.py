"""Rows in blocks that stay in cache, shared between two threads.

Numpy's take, reductions and arithmetic release the GIL, so a second thread helps where a pass over
memory is the cost. Every row is made by one thread from start to end: the bits do not depend on how
rows are shared out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np

BLOCK_BYTES = 256 * 1024  # of one temporary; a kernel has two or three of them in a core's cache
THREAD_BYTES = 4 * 1024 * 1024  # of work below which starting a thread costs more than it saves


def run_blocks(num_rows: int, row_bytes: int, work_bytes: int, work: Callable[[int, int, int], None]) -> None:
    """Call ``work(start, stop, block)`` for ranges that together are ``range(num_rows)``.

    ``work`` goes through its range in steps of ``block`` rows, so that it can allocate its
    temporaries once. It must not touch rows outside its range. Floating-point warnings are off in
    it: infinities and NaNs are data.
    """
    block = max(1, BLOCK_BYTES // max(row_bytes, 1))
    half = 0
    if work_bytes >= THREAD_BYTES and num_rows > 1 and (os.cpu_count() or 1) > 1:
        half = num_rows // 2
    failures: list[BaseException] = []

    def run(start: int, stop: int) -> None:
        # An exception in a thread would be printed and lost.
        try:
            with np.errstate(all="ignore"):
                work(start, stop, block)
        except BaseException as error:
            failures.append(error)

    if half:
        # A thread a call and no pool: a pool does not survive a fork, and starting one costs 0.1 ms.
        helper = threading.Thread(target=run, args=(0, half), daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads to be had
            half = 0
        try:
            run(half, num_rows)
        finally:
            if half:
                helper.join()
    else:
        run(0, num_rows)
    if failures:
        raise failures[0]
