"""Runs `pdserve` on a host of network_namespaces.py, whose descriptor is the last argument."""

from __future__ import annotations

import os
import runpy
import sys

from tests.support.network_namespaces import enter

if __name__ == "__main__":
    namespace = int(sys.argv.pop())
    enter(namespace)
    os.close(namespace)
    runpy.run_module("pdserve", run_name="__main__", alter_sys=True)
