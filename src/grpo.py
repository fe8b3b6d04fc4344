"""`accelerate launch src/grpo.py --config RECIPE.yaml`: GRPO. docs/how-to/training-guide.md"""

import rewards  # noqa: F401 - registers the rewards that recipes name

from grpo_runs.recipe.main import main

if __name__ == "__main__":
    main("grpo")
