"""What a running service was measured to do, in a file that simulation and planning read."""
