"""What a run writes: log files, trackers, the terminal, records of credit."""
