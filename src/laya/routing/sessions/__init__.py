"""The session table: which target of a route has a session's KV cache, in memory and where the mode says so on disk."""
