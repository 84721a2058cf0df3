"""The output of `pdserve up`: a spinner on a terminal or plain lines, and the ready file."""

from __future__ import annotations

import json
import shlex
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rich.status import Status


class Display:
    """Owns the terminal's spinner until `close`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._doing: dict[str, str] = {}
        self._began = time.monotonic()

    def starting(self, awaited: Iterable[str], run_dir: Path) -> None:
        self._console.print(f"starting {', '.join(awaited)}; logs in {escape(str(run_dir))}")
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()

    def doing(self, name: str, what: str) -> None:
        if self._doing.get(name) == what:
            return
        self._doing[name] = what
        if self._status is None:
            self._console.print(f"{name}: {escape(what)}")

    def waiting(self, awaited: Iterable[str]) -> None:
        """Refresh the spinner with what each awaited process is doing."""
        if self._status is not None:
            parts = [f"{name} ({escape(self._doing.get(name, 'starting'))})" for name in awaited]
            self._status.update(f"{time.monotonic() - self._began:.0f} s  {', '.join(parts)}")

    def tell(self, text: str, *, is_error: bool = False) -> None:
        self._console.print(escape(text), style="red" if is_error else None)

    def serving(self, routers: Sequence[Mapping[str, str]], model: str) -> None:
        took = time.monotonic() - self._began
        self.close()
        http, grpc = routers[0]["http"], ",".join(router["grpc"] for router in routers)
        lines = [
            f"[bold green]serving {escape(model)}[/] after {took:.1f} s",
            f"  HTTP  {', '.join(router['http'] for router in routers)}  (OpenAI-compatible)",
            f"  gRPC  {', '.join(router['grpc'] for router in routers)}",
            "",
            "Try it:",
            f"  {escape(curl_line(http, model))}",
            f"  pdserve chat --grpc {grpc}",
            f"  pdserve status --grpc {routers[0]['grpc']}",
            "",
            "Ctrl-C stops it.",
        ]
        for line in lines:
            self._console.print(line)

    def died(self, name: str, code: int, failure: str, tail: Iterable[str], log: Path) -> None:
        self.close()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        self._console.print(f"[bold red]{name} died ({how})[/]")
        if failure:
            self._console.print(f"  {escape(failure)}")
        else:
            for line in tail:
                self._console.print(f"  {escape(line)}", style="dim")
        self._console.print(f"  its log: {escape(str(log))}")

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def curl_line(http: str, model: str) -> str:
    """Return a chat request for a shell."""
    question = {"role": "user", "content": "What does a prefill worker do?"}
    body = {"model": model, "messages": [question], "temperature": 0, "stream": True}
    words = ["curl", "-N", f"{http}/v1/chat/completions", "-H", "Content-Type: application/json"]
    return shlex.join([*words, "-d", json.dumps(body)])
