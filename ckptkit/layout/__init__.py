"""Which part of which tensor lies on which rank."""
