"""The only room with transports: client connections, backend pools, listening, draining."""
