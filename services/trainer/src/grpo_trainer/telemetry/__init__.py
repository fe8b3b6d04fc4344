"""What a run reports: the record of each step, where it goes, alerts, benchmark times."""
