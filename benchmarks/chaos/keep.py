"""`python -m benchmarks.chaos.keep RESULT [RESULT ...]`: keep a run of the matrix, or several whose
rows are put together, and show it in the README."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.chaos.result import MatrixResult, joined, read, to_json
from benchmarks.chaos.table import markdown
from benchmarks.errors import BenchError
from benchmarks.standard.readme import between
from benchmarks.standard.sets import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

BEGIN: Final = "<!-- made by pdserve chaos: begin -->"
END: Final = "<!-- made by pdserve chaos: end -->"
KEPT: Final = Path("benchmarks") / "results" / "chaos.json"


def with_matrix(readme: str, result: MatrixResult) -> str:
    """``readme`` with a run's table between the markers. Raises :class:`BenchError`."""
    return between(readme, BEGIN, END, _text(result))


def _text(result: MatrixResult) -> str:
    settings = result.settings
    passed = sum(row.passed for row in result.rows)
    times = f", in {result.runs} runs" if result.runs > 1 else ""
    about = (
        f"`{result.trace}`, {settings['requests']} requests a row; {result.model} on "
        f"{result.engine}, {result.workers}, {result.host['cores']} cores; {result.created[:10]}: "
        f"{passed} of {len(result.rows)} rows passed{times}."
    )
    return f"{about}\n\n{markdown(result)}\n"


def keep(sources: Sequence[Path], root: Path = ROOT) -> None:
    """Raises :class:`BenchError`."""
    result = joined([read(source) for source in sources])
    (root / KEPT).write_text(to_json(result), encoding="utf-8")
    path = root / "README.md"
    readme = path.read_text(encoding="utf-8")
    path.write_text(with_matrix(readme, result), encoding="utf-8")


def main() -> int:
    """The exit status."""
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -m benchmarks.chaos.keep RESULT [RESULT ...]\n")
        return 2
    try:
        keep([*map(Path, sys.argv[1:])])
    except BenchError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
