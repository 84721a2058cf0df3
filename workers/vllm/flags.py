"""Conversion of `vllm serve` flags to pdserve's configuration, by vLLM's own parser.

`python -m workers.vllm.flags WORDS` parses WORDS, a JSON list, and reports the result of `read`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
from typing import TYPE_CHECKING, Any, NoReturn

from pdserve.config import served_names
from pdserve.errors import ConfigError
from pdserve.process.child import add_child_options, served_process
from pdserve.security.keys import hash_key
from pdserve.suggestions import for_flags
from pdserve.types import Role
from workers.vllm.start.settings import RESERVED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Flags of vLLM's API server -> configuration keys of pdserve.
_KEYS = {
    "host": "router.http.host",
    "port": "router.http.port",
    "grpc_port": "router.grpc.port",
    "ssl_certfile": "router.access.http_tls.cert_file",
    "ssl_keyfile": "router.access.http_tls.key_file",
    "allowed_origins": "router.http.cors_origins",
}
# Alternatives to other flags.
_INSTEAD = {
    "allow_credentials": "cookies are never accepted",
    "allowed_headers": "pages of --allowed-origins may send any header",
    "allowed_methods": "pages of --allowed-origins may use any method",
    "api_server_count": "--routers N starts N routers",
    "chat_template": "save it in the model's directory as chat_template.jinja",
    "default_chat_template_kwargs": "send chat_template_kwargs with a request",
    "data_parallel_size_local": "--decode N, or up.decode.data_parallel_size",
    "enable_force_include_usage": "send stream_options.include_usage with a request",
    "enable_log_requests": "router.log.access, and /console lists requests",
    "kv_transfer_config": "worker.kv.transports",
    "nnodes": "worker.nodes.count",
    "otlp_traces_endpoint": "router.otlp_endpoint",
    "reasoning_parser_plugin": "router.parsers.command",
    "return_tokens_as_token_ids": "send return_token_ids with a request",
    "root_path": "let the proxy remove the prefix",
    "ssl_ca_certs": "router.access.http_tls.ca_file",
    "ssl_cert_reqs": "router.access.http_tls.ca_file demands client certificates",
    "tool_parser_plugin": "router.parsers.command",
    "uvicorn_log_level": "router.log.level",
}
# Flags that vLLM had in earlier versions.
_GONE = {
    "--disable-log-requests": "requests are not logged unless router.log.access is set",
    "--enable-reasoning": "--reasoning-parser alone turns it on",
    "--guided-decoding-backend": "--structured-outputs-config.backend",
    "--max-seq-len-to-capture": "--max-cudagraph-capture-size",
    "--rope-scaling": "--hf-overrides.rope_parameters",
    "--speculative-model": "--speculative-config.model",
    "--swap-space": "worker.kv.tiers keeps KV in host memory",
    "--task": "--pooling N starts workers for embeddings; else --runner or --convert",
}
# vLLM's defaults. It listens on all addresses. Our gRPC port is the HTTP port + 1.
_HOST, _PORT = "0.0.0.0", 8000
# Flags accepted with these values only, because pdserve always behaves so.
_ALWAYS = {
    "api_server_count": 1,
    "disable_fastapi_docs": True,
    "disable_log_stats": True,
    "disable_uvicorn_access_log": True,
    "enable_auto_tool_choice": True,
    "enable_log_requests": False,
    "enable_prompt_tokens_details": True,
    "enable_request_id_headers": True,
    "enable_ssl_refresh": True,
    "headless": False,
}
# The number of ranks in a data-parallel group, by role. Pooling workers have no ranks.
_GROUP = "data_parallel_size"
_GROUPED = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
# Engine arguments that only vLLM's API server implements.
_OF_SERVER = frozenset({"reasoning_parser", "reasoning_parser_plugin"})
_FLAG = re.compile(r"-(?![\d.])")  # matches a flag, but not a negative number


def read(words: Sequence[str]) -> dict[str, object]:
    """Return the configuration, by dotted key, for the words after `vllm serve`.

    The result may contain `hf_token`, which must not be written to a configuration file. Raises
    ConfigError with vLLM's message for an unknown flag, or naming all unsupported flags.
    """
    refused: list[str] = []
    common, words_by_role = _by_role(words)
    by_role: dict[str, object] = {}
    given = _parse(common)
    if size := given.pop(_GROUP, None):
        by_role = {f"up.{role}.{_GROUP}": size for role in _GROUPED}
    for role, role_words in words_by_role.items():
        try:
            of_role = _parse(role_words)
            if size := of_role.pop(_GROUP, None):
                by_role[f"up.{role}.{_GROUP}"] = size
            by_role[f"up.{role}.engine_args"] = _engine_args(of_role, f"--{role}.", refused)
        except ConfigError as error:
            raise ConfigError(f"flags of {role} alone: {error.message}") from error
    model = given.pop("model_tag", None) or given.pop("model", None)
    if model is None:
        text = "MODEL is required: a directory, or a name of the Hugging Face hub"
        raise ConfigError("\n".join((*refused, text)))
    # vLLM serves a directory under its whole path, which stays an alias.
    default = [*dict.fromkeys((*served_names(model, ()), model))]
    names = given.pop("served_model_name", None) or default
    if revision := given.pop("revision", None):
        model = f"{model}@{revision}"
    keys: dict[str, object] = {"worker.model": model, "worker.model_names": names}
    token = given.pop("hf_token", None)  # True: the token of `hf auth login`
    if isinstance(token, str):
        keys["hf_token"] = token
    keys["router.http.host"] = given.pop("host", None) or _HOST
    port = keys["router.http.port"] = given.pop("port", _PORT)
    keys["router.grpc.port"] = port and port + 1
    keys |= {key: given.pop(name) for name, key in _KEYS.items() if name in given}
    if adapters := given.pop("lora_modules", None):
        keys["worker.adapters"] = {x.name: x.path for x in adapters}
    api_keys = given.pop("api_key", None) or [x for x in [os.environ.get("VLLM_API_KEY")] if x]
    if api_keys:
        keys["router.tenants"] = [{"name": "default", "keys": [hash_key(x) for x in api_keys]}]
    keys["worker.engine_args"] = _engine_args(given, "--", refused)
    if refused:
        raise ConfigError("\n".join(refused))
    return keys | by_role


def _by_role(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split off flags of one role, such as `--prefill.max-num-seqs 8`. Return the common words and
    the words by role."""
    common: list[str] = []
    by_role: dict[str, list[str]] = {}
    flags_of = common
    for word in words:
        if _FLAG.match(word):
            role, dot, name = word.removeprefix("--").partition(".")
            is_of_role = bool(dot) and role in set(Role)
            flags_of = by_role.setdefault(role, []) if is_of_role else common
            flags_of.append(f"--{name}" if is_of_role else word)
        else:
            flags_of.append(word)
    return common, by_role


def _engine_args(given: Mapping[str, Any], prefix: str, refused: list[str]) -> dict[str, Any]:
    """Return the engine arguments from parsed flags. Adds a line to `refused` for other flags."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    args: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ALWAYS and value == _ALWAYS[name]:
            continue
        flag = prefix + name.replace("_", "-")
        instead = f"; instead: {_INSTEAD[name]}" if name in _INSTEAD else ""
        if name == "model_tag":
            refused.append(f"{value!r} follows a flag {prefix}...; put MODEL before it")
        elif name not in known or name in _OF_SERVER:
            text = "pdserve's router does not honour this flag of vLLM's server"
            refused.append(f"{flag}: {text}{instead}")
        elif name in RESERVED:
            refused.append(f"{flag}: pdserve sets this engine argument itself{instead}")
        else:
            args[name] = value
    return args


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Return the given flags by vLLM's argument name, as plain values."""
    parser, known = _parser()
    # Flags that only enable something have no opposite, which is the default.
    given = [x for x in words if not (x not in known and x.replace("--no-", "--", 1) in known)]
    return vars(parser.parse_args(["serve", *given], argparse.Namespace()))


@functools.cache
def _parser() -> tuple[argparse.ArgumentParser, frozenset[str]]:
    """Return vLLM's parser without defaults, so that the result has only the given flags, and all
    flags."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ModuleNotFoundError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

    class FlagParser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            words = message.split() if message.startswith("unrecognized") else []
            flags = {word.partition("=")[0] for word in words}
            gone = "".join(f"; instead of {x}: {_GONE[x]}" for x in sorted(flags & {*_GONE}))
            others = flags - {*_GONE}
            raise ConfigError(message + gone + for_flags(others, serve._option_string_actions))

    parser = FlagParser(prog="pdserve")
    # An abbreviation may mean another flag in the next version of vLLM.
    serve = make_arg_parser(parser.add_subparsers().add_parser("serve", allow_abbrev=False))
    for action in serve._actions:
        action.default = argparse.SUPPRESS
        if callable(action.type):
            action.type = _plain(action.type)
    return parser, frozenset(serve._option_string_actions)


def _plain(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `parse` to return the JSON value of the text instead of an instance of vLLM's classes,
    which a configuration file cannot contain."""
    from vllm.engine.arg_utils import _expand_json_human_readable_numbers

    @functools.wraps(parse)
    def parse_plain(text: str) -> Any:
        value = parse(text)
        if dataclasses.is_dataclass(value):
            return json.loads(_expand_json_human_readable_numbers(text))
        return value

    return parse_plain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words")
    add_child_options(parser)
    args = parser.parse_args()
    with served_process(args) as reports:
        reports.ready(read(json.loads(args.words)))


if __name__ == "__main__":
    main()
