"""What Python programs pass to a run, and what they get back."""
