"""How large a property may be. What is larger is refused in one line; nothing here limits what is proved of it."""

BYTES = 32 << 20
"""Of a property file or an ``instances.csv``, unpacked."""
