"""Recipes: YAML files and flags with the keys of TRL's trainer, translated to the keys here."""
