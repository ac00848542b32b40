"""Training: state and optimizer, log-probs, the update, and imitation."""
