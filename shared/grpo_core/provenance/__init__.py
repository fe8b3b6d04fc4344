"""Where a run's weights come from: its records on disk, and what they prove."""
