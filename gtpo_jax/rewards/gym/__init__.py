"""Problems of the library reasoning-gym: their rows, and scores of answers by its own scorers."""
