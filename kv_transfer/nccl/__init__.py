"""KV from GPU to GPU over NCCL. Nothing here is imported, loaded or started unless it is
configured.

    binding   the few calls we make, by ctypes
    messages  what the two ends of a pair tell each other beside NCCL
    actions   what a pair is asked, and the work it answers with
    pair      one two-rank communicator: a state machine without I/O
    pool      a process's pairs, within a memory budget
    thread    the one thread that makes every NCCL call
"""
