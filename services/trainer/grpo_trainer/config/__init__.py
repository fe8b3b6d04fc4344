"""Options of `grpo`: the command line and the settings made of it. No torch, no I/O."""
