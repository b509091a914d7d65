"""The engine's decisions: admission, paged KV bookkeeping, the schedule. No torch, no sockets."""
