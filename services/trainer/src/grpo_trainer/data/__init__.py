"""From a batch of run-api to tensors: filter, collate, count."""
