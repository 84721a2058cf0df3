"""vLLM's worker class for engines on a CPU. Tested with vLLM 0.32.0
(vllm/v1/worker/cpu_worker.py, vllm/distributed/device_communicators/cpu_communicator.py)."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.distributed import get_pp_group, get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from kv_transfer.vllm.kv_layout import allocate_untouched
from workers.vllm.patches.compiled import mend_compiled

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SHARED = Path("/dev/shm")


class RankOnCpu(CPUWorker):  # type: ignore[misc]
    """Leaves unused pages of the KV cache to the system, and no files behind."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        with allocate_untouched():
            super().initialize_from_config(kv_cache_config)

    def init_device(self) -> None:
        """Remove the names of the memory over which ranks exchange tensors. vLLM never removes
        them, so each start would leak 4 MiB a rank."""
        super().init_device()
        mend_compiled()
        for group in (get_tp_group(), get_pp_group()):
            communicator = getattr(group.device_communicator, "dist_module", None)
            if name := getattr(communicator, "group_name", ""):
                # All ranks of the group have mapped it, because vLLM ends with a barrier.
                for path in _SHARED.glob(f"{glob.escape(name)}_*"):
                    path.unlink(missing_ok=True)
