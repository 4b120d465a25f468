"""Who runs next, and who owns which KV slot: requests, policies, admission, commit (no torch)."""
