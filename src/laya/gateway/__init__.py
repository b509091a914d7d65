"""A request's life between the parsers and the places that answer it. No transports, no torch."""
