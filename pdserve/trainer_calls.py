"""The HTTP calls with which trainers change the weights of a model, by method and path. The router
answers them (router/api/route_table.py), and workers pass them on to it."""

from __future__ import annotations

from typing import Final

UPDATE_CALLS: Final = (
    ("POST", "/pause"),
    ("POST", "/pause_generation"),
    ("POST", "/resume"),
    ("POST", "/continue_generation"),
    ("GET", "/is_paused"),
    ("POST", "/update_weights"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/collective_rpc"),
    ("GET", "/weight_info"),
    ("GET", "/model_info"),
    ("GET", "/get_weight_version"),
    ("GET", "/get_world_size"),
    ("GET", "/is_sleeping"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/reset_mm_cache"),
    ("POST", "/reset_encoder_cache"),
)
# What trainers ask each engine before the first update.
READY_CALLS: Final = (("GET", "/health"), ("GET", "/health_generate"), ("GET", "/v1/models"))
