"""The command line itself: help, version, exit codes and configuration."""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING

import pytest

from pdserve import __version__
from pdserve.cli import build_parser, main
from pdserve.cli.options import api_key_from, config_from
from pdserve.cli.serve import flags_from
from pdserve.config import all_keys
from pdserve.errors import ConfigError
from pdserve.process import gpus
from pdserve.security.keys import hash_key
from tests.support.commands import ROOT, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEAVY = ("vllm", "torch", "aiohttp", "rich", "router.main", "workers.main", "kv_transfer", "numpy")


def commands(parser: argparse.ArgumentParser, *above: str) -> Iterator[tuple[str, ...]]:
    """Yield every command and its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield *above, name
                yield from commands(below, *above, name)


@pytest.mark.parametrize("words", [*commands(build_parser())], ids=" ".join)
def test_every_command_explains_itself(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"pdserve {' '.join(words)}" in shown
    assert len(shown.splitlines()) <= 52, "more than a screen"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pdserve {__version__}\n"


@pytest.mark.parametrize("words", ["up", "serve /models/m", "worker --router 127.0.0.1:1"])
def test_without_vllm_a_command_says_what_to_install(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "find_spec", {"torch": object()}.get)
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert f"worker.engine: vllm needs packages that {sys.executable} does not have: vllm;" in shown
    assert "pip install 'pdserve[gpu]'" in shown


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["up", "--wings"], ["up", "--prefill", "two"], ["worker", "--role", "x"]]
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (
            ["up", "--prefil", "2"],
            "pdserve up: error: unrecognized arguments: --prefil 2; did you mean --prefill?",
        ),
        (["up", "--modle=x"], "did you mean --model?"),
        (["bench", "replay", "--slo-tfft", "9"], "did you mean --slo-ttft?"),
        (["statsu"], "did you mean status?"),
    ],
)
def test_abbreviations_are_refused_and_mistyped_words_get_a_hint(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "pools"),
    [
        ("--aggregated 2", (0, 0, 2)),
        ("--aggregated 2 --decode 1 --prefill 1", (1, 1, 2)),
        ("--aggregated 2 --max-decode 3", (1, 1, 2)),
        ("--aggregated 0", (1, 1, 0)),
        ("--pooling 1", (1, 1, 0)),
    ],
)
def test_aggregated_workers_alone_are_all(
    words: str, pools: tuple[int, ...], tmp_path: Path
) -> None:
    up = config_from(build_parser().parse_args(["up", *words.split()])).up
    assert (up.prefill.workers, up.decode.workers, up.aggregated.workers) == pools
    path = tmp_path / "config.yaml"
    path.write_text("up: {prefill: {workers: 3}}")
    up = config_from(build_parser().parse_args(["up", *words.split(), f"--config={path}"])).up
    assert up.prefill.workers == (1 if "--prefill" in words else 3), "a file says what there is"


def test_a_file_of_flags_is_the_same_as_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(
        "model: /m\nmax-model-len: 8192\nenable_prefix_caching: false\ndecode.max_num_seqs: 4\n"
        "tool_call_parser: hermes\nprefill: 2\nserved-model-name: [a, b]\n"
        "hf_overrides: {x: {y: 1}}\n"
        "enforce-eager: true\nseed: null\n"
    )
    words = ["--decode", "3", "--max-model-len", "4096"]
    of_file = [
        *("--max-model-len=8192", "--no-enable-prefix-caching", "--decode.max-num-seqs=4"),
        *("--served-model-name", "a", "b", '--hf-overrides={"x": {"y": 1}}', "--enforce-eager"),
    ]
    keys = {"router.parsers.tool_calls": "hermes", "up.prefill.workers": 2, "up.decode.workers": 3}
    for given, model in (([], "/m"), (["/n"], "/n")):
        args = build_parser().parse_args(["serve", *given, f"--config={path}", *words])
        assert flags_from(args) == (keys, [model, *of_file, "--max-model-len", "4096"])


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("router.http_prot=1", "did you mean http.port?"),
        ("router.http.port=many", "router.http.port: expected `int`"),
        ("nonsense", "must be KEY=VALUE"),
    ],
)
def test_a_wrong_configuration_exits_with_2_and_names_the_key(
    setting: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--set", setting]) == 2
    assert reason in capsys.readouterr().err


def test_help_needs_none_of_the_heavy_packages() -> None:
    code = (
        "import sys; from pdserve.cli import build_parser; build_parser(); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"


def test_options_lie_over_set_and_both_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pdserve.yaml"
    path.write_text("router: {http: {port: 1}, grpc: {port: 2}, lease_s: 3}\n")
    words = ["up", "--config", str(path), "--http-port", "4", "--set", "router.grpc.port=5"]
    config = config_from(build_parser().parse_args([*words, "--kv-transport", "tcp,shm"]))
    assert (config.router.http.port, config.router.grpc.port, config.router.lease_s) == (4, 5, 3)
    assert config.worker.kv.transports == ("tcp", "shm")


def test_the_printed_configuration_shows_what_was_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "worker.engine_args={seed: 7}"]) == 0
    printed = capsys.readouterr().out
    assert "engine_args: {seed: 7}" in printed
    for key in all_keys():
        assert "[]" in key.dotted or f"{key.dotted.rpartition('.')[2]}: " in printed


def test_check_prints_no_key_and_has_vllm_read_the_engine_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def read_flags(words: list[str], *_: object) -> dict[str, object]:
        asked.append(words)
        if "--max-modl-len=5" in words:
            raise ConfigError("unrecognized arguments: --max-modl-len=5")
        return {}

    monkeypatch.setattr("pdserve.deploy.local.vllm_flags.read_flags", read_flags)
    check = ["config", "--check", "--set"]
    assert main([*check, "router.http.port=1"]) == 0
    assert capsys.readouterr().out == "the configuration is valid\n"
    assert not asked
    assert main([*check, "up.decode.engine_args={async_scheduling: false, seed: 1}"]) == 0
    assert asked == [["MODEL", "--decode.no-async-scheduling", "--decode.seed=1"]]
    models = "up.models=[{model: a}, {model: b, engine_args: {max_modl_len: 5}}]"
    assert main([*check, models]) == 2
    assert "up.models[1]: engine_args" in capsys.readouterr().err


def test_a_key_is_hashed_and_a_new_one_shown_with_its_hash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["config", "hash-key", "--new"]) == 0
    key, digest = capsys.readouterr().out.split()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
    assert main(["config", "hash-key"]) == 0
    assert capsys.readouterr().out.strip() == digest == hash_key(key)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["config", "hash-key"]) == 2


def test_a_key_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "from the environment")
    for command in (["generate", "hi"], ["chat"], ["bench", "replay"]):
        args = build_parser().parse_args(command)
        assert api_key_from(args) == "from the environment"
        args = build_parser().parse_args([*command, "--api-key", "given"])
        assert api_key_from(args) == "given"
