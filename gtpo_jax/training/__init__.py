"""State, head, update and imitation."""
