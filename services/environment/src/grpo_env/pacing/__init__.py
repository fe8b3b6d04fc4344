"""How many groups to start, and how many failures to allow. Pure: no client, no task."""
