"""Model name -> route -> target. Pure decisions; no transports, no torch."""
