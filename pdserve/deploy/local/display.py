"""The output of `pdserve up`: plain lines, and on a terminal a spinner until all processes are
ready."""

from __future__ import annotations

import json
import shlex
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner

from pdserve.config import DEMO_MODEL_NAME
from pdserve.deploy.local.restarts import last_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_TAIL_LINES = 20
_LINE_EVERY_S = 10.0  # for each process, without a terminal


class Display:
    """Owns the terminal's spinner until `close`."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._doing: dict[str, str] = {}  # by process; "" once it is ready
        self._tell_at: dict[str, float] = {}  # earliest time of a process's next line
        self._began = time.monotonic()

    def starting(self, names: Iterable[str], run_dir: Path) -> None:
        self._doing = dict.fromkeys(names, "starting")
        self.tell(f"starting {', '.join(self._doing)}; logs in {run_dir}")
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._progress, console=self._console, transient=True)
            self._live.start()

    def _progress(self) -> Spinner:
        parts = [f"{name} ({escape(what)})" for name, what in self._doing.items() if what]
        waiting_for = ", ".join(parts) or "waiting for the routers"
        self._spinner.update(text=f"{time.monotonic() - self._began:.0f} s  {waiting_for}")
        return self._spinner

    def doing(self, name: str, what: str) -> None:
        """Show the current start-up step of a process; "" means that it is ready."""
        is_new = what and what != self._doing.get(name)
        self._doing[name] = what
        now = time.monotonic()
        if is_new and self._live is None and now >= self._tell_at.get(name, 0.0):
            self._tell_at[name] = now + _LINE_EVERY_S
            self.tell(f"{name}: {what}")

    def tell(self, text: str, style: str | None = None) -> None:
        self._console.print(escape(text), style=style)

    def serving(
        self, http: Sequence[str], grpc: Sequence[str], models: Sequence[str], *, has_console: bool
    ) -> None:
        self.close()
        console = f"  Console  {http[0]}/console\n" if has_console else ""
        took_s = time.monotonic() - self._began
        self.tell(f"serving {', '.join(models)} after {took_s:.1f} s", "bold green")
        self.tell(
            f"  HTTP  {', '.join(http)}  (OpenAI-compatible)\n"
            f"  gRPC  {', '.join(grpc)}\n"
            f"{console}\n"
            "Try it:\n"
            f"  {_curl_line(http[0], models[0])}\n"
            f"  pdserve chat --grpc {','.join(grpc)}\n"
            f"  pdserve status --grpc {grpc[0]}\n\n"
            "Ctrl-C stops it."
        )

    def died(self, name: str, code: int, failure: str, log: Path) -> None:
        self.close()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        self.tell(f"{name} died ({how})", "bold red")
        if failure:
            self.tell(f"  {failure}")
        else:
            for line in last_lines(log, _TAIL_LINES):
                self.tell(f"  {line}", "dim")
        self.tell(f"  its log: {log}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _curl_line(http: str, model: str) -> str:
    """Return a shell command that sends a chat request."""
    text = "What is the capital of France? Answer in one sentence."
    if model == DEMO_MODEL_NAME:  # trained on pdserve only
        text = "What does a prefill worker do?"
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "temperature": 0, "stream": True}
    words = ["curl", "-N", f"{http}/v1/chat/completions", "-H", "Content-Type: application/json"]
    return shlex.join([*words, "-d", json.dumps(body)])
