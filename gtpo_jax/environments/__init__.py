"""Tools and environments: what a model can call, and what answers it over several turns."""
