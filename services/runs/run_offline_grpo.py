#!/usr/bin/env python3
"""`python run_offline_grpo.py key=value`: the offline trainer. docs/how-to/offline-training.md"""

from grpo_runs.offline.__main__ import main

if __name__ == "__main__":
    main()
