"""The inference servers: are they ready, and which one gets a request? Nothing about tasks."""
