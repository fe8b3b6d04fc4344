"""What every user of Redis shares: the URL and the names of keys."""
