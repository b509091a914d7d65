"""What is done to a request between routing and dispatch, and to its answer on the way back. No sockets, no torch."""
