"""Request and response structs, and the codecs built from them once."""
