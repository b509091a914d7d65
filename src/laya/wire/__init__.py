"""Bytes to events and back. No sockets, no event loop: every parser here takes bytes and hands out events."""
