"""What people look at: the page at /ui and the figures behind it, which `laya top` shows too. No torch, no transports."""
