"""What router and worker take of a saturated engine's tokens a second."""
