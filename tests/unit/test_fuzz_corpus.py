"""Every input of the corpus, which includes former findings, is read or refused as declared. `make
fuzz` looks for more."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import CORPUS, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_raise_only_what_is_declared(name: str) -> None:
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    for path in kept:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_those_of_the_code(name: str) -> None:
    """A seed of an older format would be refused at its first byte."""
    for number, seed in enumerate(TARGETS[name].seeds()):
        path = CORPUS / name / f"seed-{number}"
        assert path.read_bytes() == seed, "run python -m tests.fuzz.targets"
