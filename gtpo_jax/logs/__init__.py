"""The records of a run: log files, trackers, the terminal, credit."""
