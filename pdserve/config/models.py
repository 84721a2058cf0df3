"""Names of models, and the number of ranks that engine arguments ask for."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DEMO_MODEL = "demo"
DEMO_MODEL_NAME = "pdserve-demo"
GGUF_SUFFIX = ".gguf"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")


def ranks_of(engine_args: Mapping[str, object]) -> int:
    """Return the number of a worker's ranks: tensor-parallel ranks times pipeline stages. A size
    that is no positive integer counts as one: the engine refuses it."""
    sizes = (engine_args.get(f"{way}_parallel_size") for way in ("tensor", "pipeline"))
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def served_names(model: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a model, given the keys `model` and `model_names`."""
    if names or model == DEMO_MODEL:
        return names or (DEMO_MODEL_NAME,)
    if is_hub_name(model):
        return (model.partition("@")[0],)
    return (Path(model).name.removesuffix(GGUF_SUFFIX),)


def is_hub_name(model: str) -> bool:
    """Return True for a name of the Hugging Face hub, which no file has too."""
    if model.endswith(GGUF_SUFFIX):
        return False
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists()
