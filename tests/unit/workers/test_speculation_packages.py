"""A speculative method whose package is missing is refused before a model is loaded."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from workers.vllm import speculation


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ({"method": "ngram"}, "numba"),
        ({"model": "[ngram]"}, "numba"),
        ({"method": "suffix"}, "arctic-inference"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, str], package: str
) -> None:
    monkeypatch.setattr(speculation, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        speculation.check_packages(config)
    speculation.check_packages({"method": "eagle"})
