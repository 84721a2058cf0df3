"""What speculation needs and excludes is refused by name."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError, UnsupportedField
from pdserve.types import SamplingParams
from workers.vllm.patches import speculation


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


@pytest.mark.parametrize("seed", [0, 7])
def test_runner_v1_on_a_gpu_takes_no_seed(seed: int) -> None:
    fields = speculation.unsupported_fields(speculates=True, is_runner_v1_on_gpu=True)
    assert fields == ("min_p", "logit_bias", "seed")
    with pytest.raises(UnsupportedField, match="'seed' is not supported"):
        SamplingParams(seed=seed).check_supported(fields)
    for without in (None, -1):
        SamplingParams(seed=without).check_supported(fields)
    assert speculation.unsupported_fields(speculates=False, is_runner_v1_on_gpu=False) == ()
