"""An engine without a model, for tests, simulation and trying out."""
