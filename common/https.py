"""Requests a resource over HTTP from the address it was given, and follows no redirect.

An opener of ``urllib`` that follows no redirection, so that what a request carries (a site's signature, an alarm's
text) reaches only whom it was meant for, and no address of an inner network is asked on a stranger's word. It opens
https alone, and http where that was asked for; never a file. An answer of 300 to 399 is an HTTPError like any other.
"""

from __future__ import annotations

import ssl
import urllib.request


def opener(
    context: ssl.SSLContext | None = None, *, plain: bool = False, proxies: bool = True
) -> urllib.request.OpenerDirector:
    """An opener that asks one address.

    Args:
        context: Whose certificates are believed; the system's authorities where there is none.
        plain: Whether http is opened, too.
        proxies: Whether a proxy is used that the environment names.
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
