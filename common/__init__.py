"""Contains the code that server and sites share: privacy, ledgers, codecs, data and message formats.

It imports neither ``server`` nor ``client``.
"""

__version__ = "0.2.0"
"""Version of the running code, equal to the version of the installed package."""
