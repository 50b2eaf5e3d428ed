"""A model behind an HTTP interface: the library's server, which reads a request unchecked, with checks before it."""

from .server import serve

__all__ = ["serve"]
