"""The demo model: a small Llama-architecture checkpoint that this repository trains itself.

`pdserve.demo.corpus` makes the text, `pdserve.demo.train` trains on it, and the result is shipped
in `MODEL_DIR`, so that the system can serve real tokens with no model hub and no GPU.
"""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""The shipped checkpoint: weights, configuration, tokenizer and chat template."""

__all__ = ["MODEL_DIR"]
