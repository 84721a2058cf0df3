"""The files of LoRA adapters."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pdserve.errors import InvalidRequest
from pdserve.types import Adapter

_CONFIG = "adapter_config.json"
# vLLM reads the first one that is there.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_DIGITS = 12


def read_adapter(name: str, path: str, model: str) -> Adapter:
    """Return the adapter in the directory `path`. Raises InvalidRequest if its files are not there.
    Reads all of them, so call it in a thread."""
    directory = Path(path).expanduser().resolve()
    weights = [x for x in _WEIGHTS if (directory / x).is_file()][:1]
    if not weights or not (directory / _CONFIG).is_file():
        text = f"{directory} holds no LoRA adapter: {_CONFIG} and {_WEIGHTS[0]} are not both there"
        raise InvalidRequest(text, field="lora_path")
    digest = hashlib.sha256()
    for file in (_CONFIG, *weights):
        with (directory / file).open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return Adapter(name, digest.hexdigest()[:_DIGITS], str(directory), model)
