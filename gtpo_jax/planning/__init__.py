"""What a run needs on hardware that is not here."""
