"""How much the environment does, and for how long it goes on when others fail. Pure."""
