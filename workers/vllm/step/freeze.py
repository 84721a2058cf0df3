"""vLLM's scheduler while it computes nothing, and requests whose KV outlives a change of weights.
Tested with vLLM 0.32.0.

Used: vllm/v1/core/sched/scheduler.py (`set_pause_state`, `kv_cache_manager`), interface.py
(PauseState), vllm/v1/core/block_pool.py (`evict_blocks`), vllm/v1/request.py (`cache_salt`,
`block_hashes`, `update_block_hashes`).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kv_transfer.vllm.connector import keep_out_of_tiers

if TYPE_CHECKING:
    from vllm.v1.request import Request


def pause(scheduler: Any) -> None:
    """Let steps compute nothing. They still process the ends of requests and transfers."""
    scheduler.set_pause_state(PauseState.PAUSED_ALL)


def unpause(scheduler: Any) -> None:
    if scheduler.pause_state is not PauseState.UNPAUSED:
        scheduler.set_pause_state(PauseState.UNPAUSED)


def is_decoding(request: Request | None) -> bool:
    """Return True if the KV of all tokens but the last is computed here, and no step is under way
    for the request."""
    if request is None or request.status is not RequestStatus.RUNNING:
        return False
    is_settled = not request.num_in_flight_tokens
    return is_settled and request.num_computed_tokens == request.num_tokens - 1


def set_apart(scheduler: Any, request: Request) -> None:
    """Let nobody find the blocks that `request` caches from now on, because their KV depends on KV
    of older weights. They get the names of a salt that no other request has."""
    request.cache_salt = f"stale\0{secrets.token_hex(16)}"
    request.block_hashes = []
    request.update_block_hashes()
    keep_out_of_tiers(scheduler.get_kv_connector(), request.request_id)


def forget_prefixes(scheduler: Any) -> None:
    """Empty the prefix cache, also if requests use blocks of it, as vLLM itself refuses to."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for pool in dict.fromkeys(x.block_pool for x in managers):
        pool.evict_blocks(set(range(pool.num_gpu_blocks)))
