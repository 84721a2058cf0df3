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
from pdserve.config import all_keys
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


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["up", "--wings"], ["up", "--prefill", "two"], ["worker", "--role", "x"]]
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("router.http_port=many", "router.http_port: expected `int`"),
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
    path.write_text("router: {http_port: 1, grpc_port: 2, lease_s: 3}\n")
    words = ["up", "--config", str(path), "--http-port", "4", "--set", "router.grpc_port=5"]
    config = config_from(build_parser().parse_args([*words, "--kv-transport", "tcp,shm"]))
    assert (config.router.http_port, config.router.grpc_port, config.router.lease_s) == (4, 5, 3)
    assert config.worker.kv.transports == ("tcp", "shm")


def test_the_printed_configuration_shows_what_was_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "worker.engine_args={seed: 7}"]) == 0
    printed = capsys.readouterr().out
    assert "engine_args: {seed: 7}" in printed
    for key in all_keys():
        assert "[]" in key.dotted or f"{key.dotted.rpartition('.')[2]}: " in printed


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
