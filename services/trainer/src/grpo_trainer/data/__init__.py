"""From a batch of run-api to tensors: wait, filter, collate, count. No forward pass, no loss."""
