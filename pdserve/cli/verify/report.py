"""Runs the checks of `pdserve verify` and shows the results."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve.cli.options import table_of
from pdserve.cli.verify.endpoint import Broken, EndpointAnswer, Refused
from pdserve.cli.verify.outcome import CheckFailed, NotApplicable, Passed
from pdserve.errors import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from pdserve.cli.verify.endpoint import Endpoint
    from pdserve.cli.verify.outcome import Check, Outcome

HOLDS, FAILS, NOT_APPLICABLE = "holds", "fails", "not applicable"
# Longest text of a request or an answer on a terminal; JSON has all of it.
MOST_SHOWN = 1500


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: Check
    outcome: Outcome
    seconds: float

    @property
    def word(self) -> str:
        match self.outcome:
            case Passed():
                return HOLDS
            case CheckFailed():
                return FAILS
            case NotApplicable():
                return NOT_APPLICABLE

    @property
    def note(self) -> str:
        match self.outcome:
            case Passed(text) | CheckFailed(text) | NotApplicable(text):
                return printable(text)

    def shown(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        evidence = self.outcome.answers if isinstance(self.outcome, CheckFailed) else ()
        return {
            "check": self.check.name,
            "promise": self.check.promise,
            "guards_against": self.check.guards_against,
            "link": self.check.link,
            "result": self.word,
            "note": self.note,
            "seconds": round(self.seconds, 3),
            "evidence": [answer.shown() for answer in evidence],
        }


async def run_check(endpoint: Endpoint, check: Check) -> CheckResult:
    """Run one check within the endpoint's `timeout_s`. A refused field makes it not applicable."""
    started = time.monotonic()
    task = asyncio.ensure_future(check.run(endpoint))
    outcome: Outcome
    try:
        if (await asyncio.wait({task}, timeout=endpoint.timeout_s))[0]:
            outcome = task.result()
        else:
            waiting = [EndpointAnswer(body) for body in endpoint.open]
            outcome = CheckFailed(f"not done within {endpoint.timeout_s:g} s", waiting)
    except Refused as error:
        outcome = NotApplicable(f"refused with {error}")
    except Broken as error:
        outcome = CheckFailed(str(error), [EndpointAnswer(error.request)])
    except (KeyError, TypeError, AttributeError) as error:
        answers = [endpoint.last] if endpoint.last else []
        outcome = CheckFailed(f"an answer is not as OpenAI's API says: {error!r}", answers)
    finally:
        task.cancel()
        await asyncio.wait({task})
    return CheckResult(check, outcome, time.monotonic() - started)


def show(console: Console, endpoint: Endpoint, results: Sequence[CheckResult]) -> None:
    """Print a table, and for each failed check the evidence to reproduce it."""
    from rich.markup import escape

    rows = [(x.check.name, x.word, x.note, x.check.guards_against) for x in results]
    title = escape(f"{endpoint.model} at {endpoint.root}")
    table = table_of(title, ("check", "result", "seen"), (), rows, notes="guards against")
    for row, result in zip(table.rows, results, strict=True):
        row.style = {HOLDS: "green", FAILS: "bold red"}.get(result.word)
    console.print(table)
    for result in results:
        if not isinstance(result.outcome, CheckFailed):
            continue
        console.print(f"\n[bold red]{result.check.name} fails[/]: {escape(result.note)}")
        lines = [f"promise: {result.check.promise}.", f"seen before: {result.check.link}"]
        lines += [json.dumps(x.shown(), ensure_ascii=False) for x in result.outcome.answers]
        for line in lines:
            cut = f"{line[:MOST_SHOWN]} … (--json has all)" if len(line) > MOST_SHOWN else line
            console.print(f"  {escape(cut)}", soft_wrap=True)
