"""Models as directories. Those of the Hugging Face hub are downloaded into its cache (HF_HOME)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.config import DEMO_MODEL, is_hub_name, refuse
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.config import WorkerConfig

# What vLLM loads is in other files. It loads pickles only where there are no safetensors.
_UNUSED = ("original/*", "metal/*", "onnx/*", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
_PICKLES = ("*.bin", "*.pt")
_OURS = ("config.json", "params.json")  # Mistral's format has the second


def with_directories(worker: WorkerConfig) -> WorkerConfig:
    """Return the configuration with directories for its model, tokenizer and draft model. Those of
    the hub are downloaded, with progress on stderr. Raises ConfigError."""
    args: dict[str, Any] = dict(worker.engine_args)
    tokenizer, draft = args.get("tokenizer"), args.get("speculative_config")
    if isinstance(tokenizer, str) and is_hub_name(tokenizer):
        revision = args.pop("tokenizer_revision", None) or ""
        args["tokenizer"] = _download(tokenizer, revision, "worker.engine_args.tokenizer")
    # A draft model without a slash is the name of a method, such as "ngram".
    if isinstance(draft, dict) and "/" in str(draft.get("model")) and is_hub_name(draft["model"]):
        key = "worker.engine_args.speculative_config.model"
        model = _download(draft["model"], draft.get("revision") or "", key)
        args["speculative_config"] = {**draft, "model": model, "revision": None}
    path = model_directory(worker.model)
    return replace(worker, model=str(path), model_names=worker.served_names, engine_args=args)


def model_directory(model: str) -> Path:
    """Return the directory of a model, as the key `worker.model` names it. Raises ConfigError."""
    if model == DEMO_MODEL:
        from pdserve.demo import MODEL_DIR

        return MODEL_DIR
    if is_hub_name(model):
        name, _, revision = model.partition("@")
        model = _download(name, revision, "worker.model")
    path = Path(model).expanduser().resolve()
    if not any((path / name).is_file() for name in _OURS):
        refuse("worker.model", f"{path} is not a model directory: it has no config.json")
    return path


@functools.cache
def _download(name: str, revision: str, key: str) -> str:
    """Return the directory of the hub's cache that holds a model. Raises ConfigError."""
    from huggingface_hub import constants, errors, snapshot_download, try_to_load_from_cache

    whole = f"{name}@{revision}" if revision else name
    fetch = functools.partial(snapshot_download, name, revision=revision or None)
    try:
        path = fetch(ignore_patterns=[*_UNUSED, *_PICKLES])
        if not any(Path(path).rglob("*.safetensors")):
            path = fetch(ignore_patterns=_UNUSED)
        return path
    except errors.GatedRepoError:
        reason = f"accept its terms at {constants.ENDPOINT}/{name} and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"{constants.ENDPOINT} has no such model, or HF_TOKEN does not give access to it"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision}"
    except errors.LocalEntryNotFoundError as error:
        # Files that nobody needs may be missing from the cache; the engine names one that it needs.
        found = try_to_load_from_cache(name, _OURS[0], revision=revision or None)
        if isinstance(found, str):
            return str(Path(found).parent)
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{error.__cause__ or error}"
        reason = (
            f"it is not in {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot be reached "
            f"({why}). Download it where it can be, with `hf download {name}`, and set HF_HOME to "
            "that cache; or give a directory"
        )
    except (OSError, ValueError) as error:
        reason = str(error)
    raise ConfigError(f"{key}: cannot get {whole}: {reason}", field=key)
