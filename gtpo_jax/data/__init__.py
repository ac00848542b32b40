"""Problems: records, synthetic tasks, batches, chat."""
