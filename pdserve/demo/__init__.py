"""The demo model: a small Llama checkpoint, trained by examples/demo_model."""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
