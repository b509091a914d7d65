"""Parts of the routing benchmark."""
