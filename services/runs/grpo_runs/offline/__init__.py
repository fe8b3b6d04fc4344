"""Trains without run-api: samples, rewards, trains, publishes and evaluates in turn."""
