"""Checks of the bridge to verifiers, which test_verifiers.py runs where verifiers is installed."""
