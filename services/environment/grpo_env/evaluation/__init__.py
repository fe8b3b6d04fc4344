"""Evaluates the policy on items that training never uses."""
