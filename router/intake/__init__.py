"""Intake: from the bytes of a call to tokenised requests. Read intake.py first."""
