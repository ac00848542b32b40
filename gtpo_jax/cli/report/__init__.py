"""What `gtpo report` draws, and `curves.png`."""
