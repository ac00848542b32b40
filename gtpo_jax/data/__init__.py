"""Problems: records, synthetic tasks, sources, batches, chat templates."""
