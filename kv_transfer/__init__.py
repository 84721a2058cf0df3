"""Moves paged KV-cache blocks from a prefill worker to a decode worker, as a vLLM connector.

connector.py faces vLLM; scheduler.py and worker.py are its two halves; source.py and target.py are
the state machines of the two ends of a transfer; links.py carries out what they decide; link.py and
transport/ do the I/O.
"""
