"""The HTML page of `gtpo report`."""
