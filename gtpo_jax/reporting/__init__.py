"""Reporting: what a run prints, logs and draws, and the HTML report."""
