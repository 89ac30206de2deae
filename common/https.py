"""Requests resources over HTTP from exactly the given address, without following redirects.

Called wherever a site or the server fetches something or sends an alarm. A redirect could send a request's content (a
site's signature, an alarm's text) to another recipient, or make this machine call an address of the internal network.
Only https is allowed, and http if the caller asks for it; other schemes such as ``file`` are not. A reply with status
300 to 399 raises HTTPError.
"""

from __future__ import annotations

import ssl
import urllib.request


def opener(
    context: ssl.SSLContext | None = None, *, plain: bool = False, proxies: bool = True
) -> urllib.request.OpenerDirector:
    """Return an opener that requests exactly the given address.

    Args:
        context: TLS context with trusted certificates; the system's authorities if None.
        plain: True to open http too.
        proxies: True to use the proxy that the environment names.

    Returns:
        The opener.
    """
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler(None if proxies else {}),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPSHandler(context=context),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ]
    if plain:
        handlers.append(urllib.request.HTTPHandler())
    found = urllib.request.OpenerDirector()
    for handler in handlers:
        found.add_handler(handler)
    return found
