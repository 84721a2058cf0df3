"""The process of a rank that patches/rank_processes.py starts: a fork of its worker.

Its arguments are file descriptors: of a pipe with what multiprocessing pickled, of the worker's
resource tracker, and those in what was pickled.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any

import torch

from pdserve.process.child import die_with


def main() -> None:
    die_with(0)
    pipe, tracker, *inherited = map(int, sys.argv[1:])
    own_tracker: Any = resource_tracker._resource_tracker
    own_tracker._fd = tracker
    server: Any = forkserver._forkserver
    server._inherited_fds = inherited
    # libgomp read the variable long ago, when the worker's parent had one thread.
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores))
    # As multiprocessing ends its forks: exit handlers are the worker's.
    os._exit(spawn._main(pipe, os.dup(pipe)))


main()
