"""Presentation of results: tables on the terminal, and report.html."""
