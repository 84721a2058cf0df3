"""``report.html``: one file that shows a comparison without a network or a script."""
