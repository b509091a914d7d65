"""One file an API: its wire form to one internal request, the engine's events to its wire form. Pure; any thread."""
