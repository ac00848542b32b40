"""Reporting: terminal output, log files and figures of a run, and the HTML report."""
