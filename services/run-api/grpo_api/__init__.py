"""run-api: queues scored groups in Redis and hands them to the trainer as batches."""
