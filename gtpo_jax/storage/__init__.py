"""Files, object stores, and locks."""
