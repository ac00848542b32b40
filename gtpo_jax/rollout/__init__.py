"""Problems to judged completions: the batch that one step learns from."""
