"""Routes: handlers parse, call and reply. State and decisions are in the rooms below."""
