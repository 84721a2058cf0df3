"""Results for people: tables on the terminal, and report.html."""
