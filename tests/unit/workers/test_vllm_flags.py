"""Flags of `vllm serve` become configuration keys with the same meaning, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import Config, load_config
from pdserve.errors import ConfigError
from pdserve.security.keys import hash_key
from workers.vllm.flags import read


def read_line(line: str) -> dict[str, Any]:
    return read(line.split())


def config_of(line: str) -> Config:
    return load_config(None, read_line(line))


def test_a_model_alone_has_vllms_addresses_and_name() -> None:
    config = config_of("org/llama")
    assert config.worker.served_names == ("org/llama",)
    router = config.router
    assert (router.http.host, router.http.port, router.grpc.port) == ("0.0.0.0", 8000, 8001)
    assert config.worker.engine_args == {}


def test_a_directory_has_the_last_part_of_its_path_as_name_and_vllms_as_alias() -> None:
    names = config_of("/models/llama-8b").worker.served_names
    assert names == ("llama-8b", "/models/llama-8b")


def test_flags_of_the_server_are_keys_of_the_router() -> None:
    config = config_of(
        "m --host ::1 --port 9000 --api-key one two --served-model-name a b --revision v2 "
        "--ssl-certfile c.pem --ssl-keyfile k.pem --disable-log-stats --lora-modules x=/a y=/b "
        '--no-headless --allowed-origins ["https://a.example"]'
    )
    router = config.router
    assert (router.http.host, router.http.port, router.grpc.port) == ("::1", 9000, 9001)
    assert (router.access.http_tls.cert_file, router.access.http_tls.key_file) == ("c.pem", "k.pem")
    assert router.http.cors_origins == ("https://a.example",)
    assert router.tenants[0].keys == (hash_key("one"), hash_key("two"))
    assert (config.worker.model, config.worker.served_names) == ("m@v2", ("a", "b"))
    assert config.worker.adapters == {"x": "/a", "y": "/b"}
    assert config.worker.engine_args == {}


@pytest.mark.parametrize(
    ("flags", "args"),
    [
        ("--max-model-len 8k -tp 2", {"max_model_len": 8000, "tensor_parallel_size": 2}),
        ("--pipeline-parallel-size 2", {"pipeline_parallel_size": 2}),
        ("--max_num_seqs=4 --max-model-len -1", {"max_num_seqs": 4, "max_model_len": -1}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--compilation-config.mode 3", {"compilation_config": {"mode": 3}}),
        ('--hf-overrides {"a":1}', {"hf_overrides": {"a": 1}}),
        (
            "--trust-remote-code --quantization fp8",
            {"trust_remote_code": True, "quantization": "fp8"},
        ),
        ("--generation-config vllm", {"generation_config": "vllm"}),
    ],
)
def test_engine_arguments_are_parsed_as_vllm_does(flags: str, args: dict[str, object]) -> None:
    assert config_of(f"m {flags}").worker.engine_args == args
    assert config_of(f"{flags} m").worker.engine_args == args


def test_flags_of_one_role_are_for_that_role() -> None:
    config = config_of(
        "m --max-num-seqs 8 --prefill.tensor-parallel-size 2 --decode.max-num-seqs=64 "
        "--prefill.enforce-eager --prefill.compilation-config.mode 1 --dtype float32"
    )
    assert config.worker.engine_args == {"max_num_seqs": 8, "dtype": "float32"}
    assert config.up.decode.engine_args == {"max_num_seqs": 64}
    own = {"tensor_parallel_size": 2, "enforce_eager": True, "compilation_config": {"mode": 1}}
    assert config.up.prefill.engine_args == own


def test_a_token_of_the_hub_stays_out_of_the_configuration() -> None:
    found = read_line("m --hf-token secret")
    assert found.pop("hf_token") == "secret"
    assert "secret" not in str(found)
    assert read_line("m --hf-token") == read_line("m")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "m --max-modle-len 8",
            "unrecognized arguments: --max-modle-len 8; did you mean --max-mod",
        ),
        (
            "m --max-num-se 8",
            "unrecognized arguments: --max-num-se 8; did you mean --max-num-seqs?",
        ),
        (
            "m --uvicorn-log-level info",
            "--uvicorn-log-level: pdserve's router does not honour this",
        ),
        ("m --uvicorn-log-level info --root-path /x", "instead: router.log.level\n--root-path: "),
        ("m --disable-log-requests", "instead of --disable-log-requests: requests are not logged"),
        ("m --task embed", "--pooling N starts workers for embeddings"),
        ("m --enable-log-requests", "instead: router.log.access"),
        ("m --max-model-len many", "argument --max-model-len: invalid human_readable_int_or_auto"),
        ("m --dtype float99", "argument --dtype: invalid choice: 'float99'"),
        ("m --decode.nope 1", "flags of decode alone: unrecognized arguments: --nope"),
        ("m --root-path /x --decode.port 1", "--decode.port: pdserve's router does not"),
        ("m --reasoning-parser qwen3", "--reasoning-parser: pdserve's router does not"),
        ("m --decode.port 1", "--decode.port: pdserve's router does not"),
        ("m --kv-transfer-config {}", "--kv-transfer-config: pdserve sets this engine argument"),
        ("m --data-parallel-rank 1", "--data-parallel-rank: pdserve sets this engine argument"),
        ("--prefill.enforce-eager m", "put MODEL before it"),
        ("--max-num-seqs 4", "MODEL is required"),
    ],
)
def test_an_invalid_flag_is_refused_with_vllms_message(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_line(line)
    assert message in caught.value.message


def test_the_size_of_a_data_parallel_group_is_of_a_role() -> None:
    up = config_of("m -dp 2 --decode.data-parallel-size 4 --enable-expert-parallel").up
    roles = (up.prefill, up.decode, up.aggregated, up.pooling)
    assert [role.data_parallel_size for role in roles] == [2, 4, 2, 1]
